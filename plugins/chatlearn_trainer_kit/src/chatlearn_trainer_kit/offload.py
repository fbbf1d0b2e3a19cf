"""Moving parts of a trainer out of device memory and back.

A part is a set of storages. Offloading copies each to host memory (pinned for a GPU) and shrinks the live one to zero
bytes; onloading grows it and copies back. Tensors, views and FSDP's bookkeeping keep pointing at the same storages, so
nothing has to be rebuilt. It works the same on CPU, where the copy lies apart and the live storage really is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import MemoryPart


class OffloadedPart:
    """The storages of one part, live or held apart."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []
        self.is_offloaded = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Hold the storages of ``tensors`` apart; each storage once, however many tensors share it."""
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
        """Bring every storage back, bit for bit."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(host)
        self._held.clear()
        self.is_offloaded = False

    def discard(self) -> None:
        """Let go of what is held apart; the live storages stay empty."""
        self._held.clear()


class OffloadedParts:
    """The parts of one trainer, each live or held apart.

    Args:
        parts: those that the trainer holds; others are ignored.
        tensors: the tensors of a part that are on the device now.
    """

    def __init__(self, parts: Collection[MemoryPart], tensors: Callable[[MemoryPart], Iterable[Tensor]]) -> None:
        self._parts = {part: OffloadedPart() for part in parts}
        self._tensors = tensors

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Hold these parts apart; those that are already are left alone."""
        for name in parts:
            if name in self._parts:
                self._parts[name].offload(self._tensors(name))

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Bring these parts back."""
        for name in parts:
            if name in self._parts:
                self._parts[name].onload()

    def discard(self) -> None:
        """Let go of what is held apart."""
        for part in self._parts.values():
            part.discard()

    def require(self, trainer: str, parts: Collection[MemoryPart]) -> None:
        """Raises: BackendError: one of these parts is offloaded; ``trainer`` says whose, for the message."""
        away = [part for part in parts if self._parts[part].is_offloaded]
        if away:
            raise BackendError(
                f"{trainer} was asked to work while its {' and '.join(away)} {'is' if away == ['optimizer'] else 'are'}"
                " offloaded; onload them first"
            )


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that these tensors occupy now, bytes; storages they share count once."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def own_storage(tensor: Tensor) -> None:
    """Give a parameter a storage that can be resized, if its memory belongs to a mapped file."""
    if not tensor.untyped_storage().resizable():
        tensor.data = tensor.data.clone()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found.setdefault(storage._cdata, storage)
    return list(found.values())
