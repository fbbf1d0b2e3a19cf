"""Moves a model's weights out of device memory and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WeightStore:
    """Holds the weights of an offloaded model in host memory.

    Meanwhile every parameter and buffer of the model has size zero. On a CPU nothing is copied: the storage changes its
    owner. Tied parameters are one object and stay tied.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: dict[int, tuple[Tensor, Tensor, torch.device]] = {}

    @property
    def holds_weights(self) -> bool:
        """Whether the model is offloaded."""
        return bool(self._held)

    @property
    def live_bytes(self) -> int:
        """Bytes that the model's tensors occupy on the model's device; shared storages count once."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in (*self._model.parameters(), *self._model.buffers())
        }
        return sum(storage.nbytes() for storage in storages.values())

    def offload(self) -> None:
        """Take the weights out of the model. A repeated call does nothing."""
        if self._held:
            return
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            self._held.setdefault(id(tensor), (tensor, tensor.data.to("cpu"), tensor.device))
        for tensor, data, device in self._held.values():
            tensor.data = torch.empty(0, dtype=data.dtype, device=device)

    def onload(self) -> None:
        """Return the weights to the model, values unchanged. A repeated call does nothing."""
        for tensor, data, device in self._held.values():
            tensor.data = data.to(device)
        self._held.clear()
