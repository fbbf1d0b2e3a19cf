"""Loads weights from memory that is overwritten after each call, as transports that reuse buffers do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from chatlearn_core.protocols import WeightLoader
from chatlearn_core.types import WeightManifest, WeightShard

T = TypeVar("T")
BUCKET_TENSORS = 3
"""Most tensors per call. Calls take at most half of what is to be loaded, so that one sync makes several."""


class ReusedMemoryLoader:
    """Calls a loader as a transport may: a few tensors per call, in memory that is overwritten after the call.

    A generator that keeps a reference to a given tensor serves garbage afterwards.
    """

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader

    def expected_manifest(self) -> WeightManifest:
        """Forward to the loader."""
        return self._loader.expected_manifest()

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """Forward to the loader."""
        await self._loader.begin(policy_version, manifest)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load through channel ``tensors``, one bucket per call."""
        given = list(tensors)
        for part in _buckets(given):
            bucket = [(name, tensor.clone()) for name, tensor in part]
            await self._loader.load_tensors(iter(bucket))
            for _, tensor in bucket:
                overwrite(tensor)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Load through channel ``boxes``, one bucket per call."""
        given = list(shards)
        for part in _buckets(given):
            bucket = [_copied(shard) for shard in part]
            await self._loader.load_boxes(iter(bucket))
            for shard in bucket:
                overwrite(shard.tensor)

    async def load_checkpoint(self, directory: Path) -> None:
        """Forward to the loader: a checkpoint's files are not reused."""
        await self._loader.load_checkpoint(directory)

    async def finish(self) -> int:
        """Forward to the loader."""
        return await self._loader.finish()


def overwrite(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with 1 if it holds integers."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _buckets(given: Sequence[T]) -> Iterator[Sequence[T]]:
    size = max(1, min(BUCKET_TENSORS, len(given) // 2))
    for start in range(0, len(given), size):
        yield given[start : start + size]


def _copied(shard: WeightShard) -> WeightShard:
    return WeightShard(shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone())
