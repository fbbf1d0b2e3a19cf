"""Loads new weights into a live model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_core.types.boxes import slices
from chatlearn_generator_kit.incoming_weights import LoadingReplica, read_checkpoint
from chatlearn_generator_kit.sync_dtype import SyncDtype
from chatlearn_generator_kit.weight_loader import ReplicaWeightLoader
from chatlearn_hf.checkpoint_names import (
    CheckpointLayout,
    checkpoint_layout,
    checkpoint_views,
    expected_manifest,
    load_checkpoint_tensors,
)

T = TypeVar("T")


class Replica(LoadingReplica, Protocol):
    """The interface of its generator that a loader needs."""

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work in the worker thread, never during a forward."""


class TransformersWeightLoader(ReplicaWeightLoader):
    """Checks offered weights against the model, copies them in place, and serves them once complete."""

    def __init__(
        self, replica: Replica, model: Any, model_path: str, dtype: torch.dtype, *, sync_dtype: SyncDtype
    ) -> None:
        super().__init__(replica, expected_manifest(model_path, dtype), sync_dtype=sync_dtype)
        self._in_worker = replica.in_worker
        self._model = model
        self._layout: CheckpointLayout = checkpoint_layout(model)
        self._views: dict[str, Tensor] = {}

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """See ``WeightLoader``. Copies each box to its place in the model's memory.

        Raises:
            WeightSyncError: see ``load_tensors``; or an element came twice.
        """
        self._incoming.require_begun("load_boxes")
        async with self._dead_on_error("loading boxes"):
            await self._in_worker(lambda: self._place(self._incoming.checked_boxes(shards)))

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``. Reads one ``model.safetensors``, or the files that its index names.

        Raises:
            WeightSyncError: see ``load_tensors``; or a file is missing or damaged.
        """
        await self.load_tensors(read_checkpoint(directory))

    async def _begin(self, manifest: WeightManifest) -> None:
        self._views = checkpoint_views(self._model, self._layout)

    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        await self._in_worker(lambda: load_checkpoint_tensors(self._model, tensors, views=self._views))

    async def _finish(self, policy_version: int) -> None:
        self._views = {}

    def _place(self, shards: Iterable[WeightShard]) -> None:
        with torch.no_grad():
            for shard in shards:
                self._views[shard.name][slices(shard.box)].copy_(shard.tensor)
