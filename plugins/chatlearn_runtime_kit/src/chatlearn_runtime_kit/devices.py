"""The device that a configuration means on this machine."""

from __future__ import annotations

import torch

from chatlearn_core.exceptions import ConfigError


def resolve_device(device: str, key: str) -> str:
    """``auto`` becomes ``cuda`` where there is one.

    Raises:
        ConfigError: a device that is not there.
    """
    available = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if available else "cpu"
    if device.startswith("cuda") and not available:
        raise ConfigError(f"{key} is {device!r}, but torch sees no CUDA device. Set it to cpu or auto")
    return device
