"""Resolves a configured device on this machine."""

from __future__ import annotations

import torch

from chatlearn_core.exceptions import ConfigError


def resolve_device(device: str, key: str) -> str:
    """Resolve ``auto`` to ``cuda`` if torch sees a CUDA device, else to ``cpu``.

    Raises:
        ConfigError: the named device does not exist.
    """
    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device.startswith("cuda") and not available:
        raise ConfigError(f"{key} is {device!r}, but torch sees no CUDA device. Set it to cpu or auto")
    return device
