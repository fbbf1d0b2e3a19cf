"""Moves parts of a trainer out of device memory and back.

A part is a set of storages. Offloading copies each to host memory (pinned for a GPU) and shrinks the live one to zero
bytes; onloading grows it and copies back. Tensors, views and FSDP's bookkeeping still refer to the same storages, so
nothing must be rebuilt. It works the same on a CPU, where the copy is separate and the live storage really is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import MemoryPart


class OffloadedPart:
    """The storages of one part, either live or offloaded."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.is_offloaded = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of ``tensors`` to host memory and empty them, each once even if several tensors
        share it.
        """
        if self.is_offloaded:
            return
        for storage in _storages(tensors):
            live = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            host.copy_(live)
            self._held.append((storage, host))
        for storage, _ in self._held:
            storage.resize_(0)
        self.is_offloaded = True

    def onload(self) -> None:
        """Restore every storage, bit-exactly."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        self._held.clear()
        self.is_offloaded = False

    def discard(self) -> None:
        """Drop the copies; the live storages stay empty."""
        self._held.clear()


class OffloadedParts:
    """The parts of one trainer, each live or offloaded.

    Args:
        parts: parts that the trainer has; others are ignored.
        tensors: returns the tensors of a part that are on the device now.
    """

    def __init__(self, parts: Collection[MemoryPart], tensors: Callable[[MemoryPart], Iterable[Tensor]]) -> None:
        self._parts = {part: OffloadedPart() for part in parts}
        self._tensors = tensors

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Offload these parts; does nothing for parts that are already offloaded."""
        for name in parts:
            if name in self._parts:
                self._parts[name].offload(self._tensors(name))

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Restore these parts."""
        for name in parts:
            if name in self._parts:
                self._parts[name].onload()

    def discard(self) -> None:
        """Drop the copies of all offloaded parts."""
        for part in self._parts.values():
            part.discard()

    def require(self, trainer: str, parts: Collection[MemoryPart]) -> None:
        """Check that these parts are live. Raises: BackendError: one is offloaded; the message starts with
        ``trainer``.
        """
        away = [part for part in parts if self._parts[part].is_offloaded]
        if away:
            raise BackendError(
                f"{trainer} cannot work while its {' and '.join(away)} {'is' if away == ['optimizer'] else 'are'}"
                " offloaded; onload them first"
            )


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that these tensors occupy now; shared storages count once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def own_storage(tensor: Tensor) -> None:
    """Give a parameter its own resizable storage, if its memory belongs to a mapped file."""
    if not tensor.untyped_storage().resizable():
        tensor.data = tensor.data.clone()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())
