"""Reads the boxes of a version from its files, either unchanged or assembled into whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightShard
from chatlearn_core.types.boxes import slices
from chatlearn_sync.weight_files import WeightIndex


def boxes_of(directory: Path, index: WeightIndex, limit: int) -> Iterator[list[WeightShard]]:
    """Yield all shards of a version in lists of at most ``limit`` bytes; a larger shard forms a list alone.

    Raises:
        WeightSyncError: a file cannot be read; names it.
    """
    with _Files(directory) as files:
        part: list[WeightShard] = []
        held = 0
        for stored, entry in index.tensors.items():
            shard = index.shard(stored, files.read(entry.file, stored))
            if part and held + shard.tensor.nbytes > limit:
                yield part
                part, held = [], 0
            part.append(shard)
            held += shard.tensor.nbytes
        if part:
            yield part


def tensors_of(directory: Path, index: WeightIndex, limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield (name, tensor) pairs of a version, assembled from its boxes, in lists of at most ``limit`` bytes; a larger
    tensor forms a list alone.

    Raises:
        WeightSyncError: a file cannot be read; names it.
    """
    stored_of: defaultdict[str, list[str]] = defaultdict(list)
    for stored in index.tensors:
        box = index.boxes.get(stored)
        stored_of[stored if box is None else box.name].append(stored)
    with _Files(directory) as files:
        part: list[tuple[str, Tensor]] = []
        held = 0
        for name, pieces in stored_of.items():
            tensor: Tensor | None = None
            for stored in pieces:
                shard = index.shard(stored, files.read(index.tensors[stored].file, stored))
                if shard.is_whole:
                    tensor = shard.tensor
                    break
                if tensor is None:
                    tensor = torch.empty(shard.global_shape, dtype=shard.tensor.dtype)
                tensor[slices(shard.box)] = shard.tensor
            assert tensor is not None
            if part and held + tensor.nbytes > limit:
                yield part
                part, held = [], 0
            part.append((name, tensor))
            held += tensor.nbytes
        if part:
            yield part


class _Files:
    """The safetensors files of a directory, each opened once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = {}
        self._stack.close()

    def read(self, file: str, name: str) -> Tensor:
        path = self._directory / file
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"{path} cannot be read: {error}") from error
        return tensor
