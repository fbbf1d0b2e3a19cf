"""The reading end of a shared block: tensors that are views of another process's memory. Needs only torch."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class MappedBlock:
    """A block of another process, opened by its path.

    Its tensors share the other process's memory and are for reading only. They are valid until ``close``.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        """Map the block.

        Args:
            content: the result of ``shared_block.handle_content`` for the block's handle.

        Raises:
            OSError: the process that owns the block is gone.
        """
        self._places = content["tensors"]
        self._map = _open(content).map

    def __enter__(self) -> MappedBlock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except BufferError:
            if kind is None:
                raise
            # The traceback of the active error keeps views alive; that error matters more, and the views go with it.

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, view) of every tensor in the block."""
        for name, tensor, _ in _views(self._map, self._places):
            yield name, tensor

    def close(self) -> None:
        """Unmap the block.

        Raises:
            BufferError: a view is still alive, and would change when the owner reuses the block.
        """
        self._map.close()


@dataclass
class _Kept:
    """A mapping and the identity of its file. A path may later lead to another block; the mapped file stays
    the same.
    """

    file: tuple[int, int]
    map: mmap.mmap


class MappedBlocks:
    """Reads blocks that their owners refill, and keeps each mapped, because page faults cost as much as a copy.

    A released block stays in memory until another block is read, or until ``close``.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    @property
    def num_kept(self) -> int:
        """Number of currently mapped blocks."""
        return len(self._kept)

    @contextmanager
    def read(self, content: Mapping[str, Any]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """Yield (name, view) of every tensor in a block; the views are valid inside the context.

        Args:
            content: the result of ``shared_block.handle_content``; with ``is_reused`` the mapping is kept.

        Raises:
            OSError: the process that owns the block is gone.
            BufferError: on exit, a view is still alive, and would change when the owner reuses the block.
        """
        if not content.get("is_reused", False):
            with MappedBlock(content) as block:
                yield block.tensors()
            return
        windows: list[weakref.ref[memoryview]] = []

        def views() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor, window in _views(self._mapping(content), content["tensors"]):
                if window is not None:
                    windows.append(window)
                yield name, tensor

        yield views()
        if any(window() is not None for window in windows):
            raise BufferError(f"views of the block at {content['path']} are still alive")

    def close(self) -> None:
        """Unmap all blocks, each once its last view is gone."""
        self._kept.clear()

    def _mapping(self, content: Mapping[str, Any]) -> mmap.mmap:
        path = content["path"]
        for other in [other for other, kept in self._kept.items() if _file(other) != kept.file]:
            del self._kept[other]  # its owner has released it or has ended
        kept = self._kept.get(path)
        if kept is None or len(kept.map) != content["num_bytes"]:
            kept = self._kept[path] = _open(content)
        return kept.map


def _open(content: Mapping[str, Any]) -> _Kept:
    descriptor = os.open(content["path"], os.O_RDWR)
    try:
        return _Kept(_identity(os.fstat(descriptor)), mmap.mmap(descriptor, content["num_bytes"]))
    finally:
        os.close(descriptor)


def _file(path: str) -> tuple[int, int] | None:
    """Return the identity of the file at a path; None if there is none."""
    try:
        return _identity(Path(path).stat())
    except OSError:
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _views(mapped: mmap.mmap, places: Any) -> Iterator[tuple[str, torch.Tensor, weakref.ref[memoryview] | None]]:
    """Yield (name, view, weak reference that lives as long as the view; None for an empty tensor)."""
    for name, dtype, shape, offset in places:
        count = 1
        for size in shape:
            count *= size
        kind = getattr(torch, dtype)
        if count == 0:
            yield name, torch.empty(shape, dtype=kind), None
        else:
            # torch keeps the memoryview, so closing the map while a view exists raises instead of crashing.
            window = memoryview(mapped)
            tensor = torch.frombuffer(window, dtype=kind, count=count, offset=offset).view(shape)
            alive = weakref.ref(window)
            del window
            yield name, tensor, alive
            del tensor
