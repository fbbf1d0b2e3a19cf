"""The reading end of a shared block: tensors that are views of another process's memory. Needs torch alone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class MappedBlock:
    """A block of another process, opened by its path.

    Its tensors share the other process's memory and are meant to be read. They are valid until ``close``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        """Map the block.

        Args:
            content: what ``shared_block.handle_content`` made of its handle.

        Raises:
            OSError: the process that owns the block is gone.
        """
        self._places = content["tensors"]
        descriptor = os.open(content["path"], os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, content["num_bytes"])
        finally:
            os.close(descriptor)

    def __enter__(self) -> MappedBlock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except BufferError:
            if kind is None:
                raise
            # Views live on in the frames of the error that is on its way: it matters more, and they go with it.

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view) of every tensor in the block."""
        for name, dtype, shape, offset in self._places:
            count = 1
            for size in shape:
                count *= size
            kind = getattr(torch, dtype)
            if count == 0:
                yield name, torch.empty(shape, dtype=kind)
            else:
                # Through a memoryview, which torch keeps: closing the map under a view is then an error, not a crash.
                yield name, torch.frombuffer(memoryview(self._map), dtype=kind, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Unmap.

        Raises:
            BufferError: a view is still alive, and would change under its holder when the owner reuses the block.
        """
        self._map.close()
