"""Releases the memory of CPU tensors in place: all references to a storage, views included, stay but become empty.

Engines can release GPU memory, but ignore the request on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def storages_of(content: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested dictionaries, lists, tuples and iterators, each once."""
    return list({storage._cdata: storage for storage in (t.untyped_storage() for t in _tensors(content))}.values())


class EmptiedStorages:
    """Storages that were resized to zero, with saved contents where they must be restored."""

    def __init__(self, storages: Iterable[torch.UntypedStorage], *, kept: Iterable[torch.UntypedStorage]) -> None:
        """Empty the storages one after the other.

        Args:
            storages: CPU storages.
            kept: storages whose content is saved; the others are restored as zeros.
        """
        keep = {storage._cdata for storage in kept}
        self._emptied: list[tuple[torch.UntypedStorage, int, int, Tensor | None]] = []
        for storage in storages:
            if num_bytes := storage.nbytes():
                content = _bytes_of(storage).clone() if storage._cdata in keep else None
                self._emptied.append((storage, num_bytes, storage.data_ptr(), content))
                storage.resize_(0)

    def fill(self) -> list[tuple[range, int]]:
        """Restore size and content of every storage.

        Returns:
            for each storage its old address range and its displacement in bytes, for code that keeps addresses.
                Example:
                ``[(range(4096, 8192), -4096)]``.
        """
        moved = []
        while self._emptied:
            storage, num_bytes, start, content = self._emptied.pop()
            storage.resize_(num_bytes)
            if content is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(content)
            moved.append((range(start, start + num_bytes), storage.data_ptr() - start))
        return moved


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        yield from (tensor for value in content.values() for tensor in _tensors(value))
    elif isinstance(content, (list, tuple, Iterator)):
        yield from (tensor for value in content for tensor in _tensors(value))
