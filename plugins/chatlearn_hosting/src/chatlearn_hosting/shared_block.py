"""The writing end of a shared block: memory from which other processes of this host read tensors without a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.types import MemoryHandle, TensorPlace, TensorSpec

ALIGNMENT = 64
"""Alignment of a tensor in its block, bytes: a cache line, and a multiple of every element size."""


class SharedBlock:
    """A block of anonymous shared memory that is filled with tensors and passed on as a ``MemoryHandle``.

    The memory has no name in any file system: other processes open it through this process's file descriptor
    (``/proc/<pid>/fd/<n>``). It is freed with the last process that maps it, however that process ends, and the size of
    ``/dev/shm`` does not limit it.
    """

    def __init__(self, num_bytes: int, directory: Path | None = None) -> None:
        """Create an empty block.

        Args:
            num_bytes: size, at least 1; pages are allocated on first write.
            directory: directory for an unnamed file instead of the kernel's anonymous memory, such as a mount with huge
                pages.

        Raises:
            OSError: no memory, or no such directory.
        """
        if directory is None:
            self._descriptor = os.memfd_create("chatlearn-block")
        else:
            self._descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        self._places: list[TensorPlace] = []
        self._used = 0
        self._map: mmap.mmap | None = None
        self.num_bytes = 0
        try:
            self._resize(num_bytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SharedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        """Path under which other processes of this user open the block while this process keeps it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor from any device into the block. Returns False, without copying, if there is no room.

        An empty block grows for a tensor that is larger than the whole block.
        """
        target = self.reserve(name, tensor)
        if target is None:
            return False
        target.copy_(tensor.detach())
        return True

    def reserve(self, name: str, tensor: Tensor) -> Tensor | None:
        """Reserve memory for a tensor and return it for the caller to fill; None if there is no room.

        Drop all references to the returned tensor before the block closes.
        """
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        stop = start + tensor.nbytes
        if stop > self.num_bytes:
            if self._places:
                return None
            self._resize(stop)
        assert self._map is not None
        target = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel() > 0:
            target = torch.frombuffer(memoryview(self._map), dtype=tensor.dtype, count=tensor.numel(), offset=start)
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        self._places.append(TensorPlace(spec, start))
        self._used = stop
        return target.view(tensor.shape)

    def handle(self) -> MemoryHandle:
        """Return a handle with which another process reads the tensors added since ``clear``. Valid while the block is
        kept.
        """
        return MemoryHandle("file", self.path, self.num_bytes, tuple(self._places))

    def clear(self) -> None:
        """Remove all tensors so that their memory is reused; no process may read them any more."""
        self._places, self._used = [], 0

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[MemoryHandle]:
        """Copy a stream of tensors through the block, yielding a handle each time it is full.

        Read each handle before requesting the next. Memory use stays below the block's size, or the largest tensor's if
        that is larger.
        """
        self.clear()
        for name, tensor in tensors:
            if not self.add(name, tensor):
                yield self.handle()
                self.clear()
                self.add(name, tensor)
        if self._places:
            yield self.handle()
        self.clear()

    def close(self) -> None:
        """Release the memory; it is freed once no other process maps it. A repeated call does nothing."""
        self.clear()
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _resize(self, num_bytes: int) -> None:
        if self._map is not None:
            self._map.close()
        os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)
        self.num_bytes = num_bytes


def handle_content(handle: MemoryHandle) -> dict[str, Any]:
    """Return a handle of kind ``file`` as plain builtins, for ``engine_side.blocks.MappedBlock`` in a
    hosted process.
    """
    if handle.kind != "file":
        raise ValueError(f"a handle of kind {handle.kind!r} is not a mapped file")
    return {
        "path": handle.content,
        "num_bytes": handle.num_bytes,
        "tensors": [
            (place.spec.name, place.spec.dtype, list(place.spec.shape), place.offset) for place in handle.tensors
        ],
    }
