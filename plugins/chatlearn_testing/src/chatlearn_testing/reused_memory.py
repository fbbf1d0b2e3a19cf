"""Weights in memory that does not last: what is given to a generator is overwritten as soon as the call returns."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from chatlearn_core.protocols import WeightLoader
from chatlearn_core.types import WeightManifest, WeightShard

BUCKET_TENSORS = 3
"""Tensors of one call: fewer than any model has, so that several calls make one sync."""


class ReusedMemoryLoader:
    """Drives a loader as a transport may: a few tensors a call, in memory of the transport's own that it then uses for
    other things. A generator that keeps a tensor it was given serves garbage from then on.
    """

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader

    def expected_manifest(self) -> WeightManifest:
        """The loader's own."""
        return self._loader.expected_manifest()

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """The loader's own."""
        await self._loader.begin(policy_version, manifest)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Channel ``tensors``, a bucket a call."""
        given = list(tensors)
        for start in range(0, len(given), BUCKET_TENSORS):
            bucket = [(name, tensor.clone()) for name, tensor in given[start : start + BUCKET_TENSORS]]
            await self._loader.load_tensors(iter(bucket))
            for _, tensor in bucket:
                overwrite(tensor)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Channel ``boxes``, a bucket a call."""
        given = list(shards)
        for start in range(0, len(given), BUCKET_TENSORS):
            bucket = [_copied(shard) for shard in given[start : start + BUCKET_TENSORS]]
            await self._loader.load_boxes(iter(bucket))
            for shard in bucket:
                overwrite(shard.tensor)

    async def load_checkpoint(self, directory: Path) -> None:
        """Channel ``checkpoint``: files are no memory to be used again."""
        await self._loader.load_checkpoint(directory)

    async def finish(self) -> int:
        """The loader's own."""
        return await self._loader.finish()


def overwrite(tensor: Tensor) -> None:
    """Put values into a tensor that no weight has."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


def _copied(shard: WeightShard) -> WeightShard:
    return WeightShard(shard.name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor.clone())
