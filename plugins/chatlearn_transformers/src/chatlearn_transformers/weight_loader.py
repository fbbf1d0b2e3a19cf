"""Taking new weights into a live model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from chatlearn_core.exceptions import ChatLearnError, WeightSyncError
from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_hf.checkpoint_names import (
    CheckpointLayout,
    checkpoint_layout,
    checkpoint_views,
    expected_manifest,
    load_checkpoint_tensors,
)
from chatlearn_hf.weight_checks import IncomingWeights, LoadingReplica, read_checkpoint, require_ready

T = TypeVar("T")


class Replica(LoadingReplica, Protocol):
    """What a loader needs of its generator."""

    async def stop_serving(self) -> None:
        """State ``loading``; returns when no forward runs."""

    async def serve(self, policy_version: int) -> None:
        """State ``serving``, under new weights."""

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """State ``dead``: every request fails."""

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work off the event loop, never beside a forward."""


class TransformersWeightLoader:
    """Checks what is offered against the model, copies it in place, and serves it once it is whole."""

    def __init__(
        self, replica: Replica, model: Any, model_path: str, dtype: torch.dtype, *, convert_dtype: bool
    ) -> None:
        self._replica = replica
        self._model = model
        self._layout: CheckpointLayout = checkpoint_layout(model)
        self._incoming = IncomingWeights(
            replica.name, expected_manifest(model_path, dtype), convert_dtype=convert_dtype
        )
        self._views: dict[str, Tensor] = {}

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: the model directory's tensors, in the dtype held here."""
        return self._incoming.expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``. Requests that run are kept: they wait and go on after ``finish``."""
        require_ready(self._replica, policy_version)
        self._incoming.begin(policy_version, manifest)
        await self._replica.stop_serving()
        self._views = checkpoint_views(self._model, self._layout)

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``.

        Raises:
            WeightSyncError: a name, shape or dtype is not what ``begin`` announced, or a name came twice; the replica
                is dead, since part of its weights may have changed.
        """
        self._incoming.require_begun("load_tensors")
        try:
            await self._replica.in_worker(
                lambda: load_checkpoint_tensors(self._model, self._incoming.checked(tensors), views=self._views)
            )
        except Exception as error:
            num_arrived = self._incoming.num_arrived
            await self._die(f"loading tensors failed: {type(error).__name__}: {error}", error)
            if isinstance(error, ChatLearnError):
                raise
            raise WeightSyncError(
                f"{self._replica.name}: loading tensors failed after {num_arrived} of "
                f"{len(self._incoming.expected.tensors)}: {type(error).__name__}: {error}"
            ) from error

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Not a channel of this generator."""
        raise WeightSyncError(
            f"{self._replica.name}: the generator 'transformers' takes whole tensors or a checkpoint, not boxes;"
            " choose a transport with channel 'tensors' or 'checkpoint'"
        )

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``: reads one ``model.safetensors``, or the files its index names.

        Raises:
            WeightSyncError: see ``load_tensors``; or a file is missing or damaged.
        """
        await self.load_tensors(read_checkpoint(directory))

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        self._incoming.require_begun("finish")
        try:
            version = self._incoming.finish()
        except WeightSyncError as error:
            await self._die(str(error))
            raise
        self._close()
        await self._replica.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``."""
        await self._die(reason)

    def _close(self) -> None:
        self._incoming.reset()
        self._views = {}

    async def _die(self, reason: str, cause: BaseException | None = None) -> None:
        self._close()
        await self._replica.die(reason, cause)
