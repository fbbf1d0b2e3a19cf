"""Loads new weights: the engine reads only its own files, so a whole version is collected, written and converted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_generator_kit.incoming_weights import LoadingReplica, read_checkpoint
from chatlearn_generator_kit.weight_loader import ReplicaWeightLoader
from ctranslate2_generator.conversion import write_model


class Replica(LoadingReplica, Protocol):
    """What the loader needs of its generator."""

    def serve_directory(self, directory: Path) -> None: ...


class CTranslate2WeightLoader(ReplicaWeightLoader):
    """Checks what arrives, copies it, and makes the engine's files once everything is there."""

    def __init__(self, replica: Replica, expected: WeightManifest, model: Path) -> None:
        super().__init__(replica, expected, sync_dtype="exact")
        self._serve_directory = replica.serve_directory
        self._model = model
        self._tensors: dict[str, Tensor] = {}

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """Refused: channel ``boxes`` is not declared."""
        raise WeightSyncError(f"{self._replica.name} takes whole tensors, no boxes; choose another weight_sync.backend")

    async def load_checkpoint(self, directory: Path) -> None:
        """See ``WeightLoader``."""
        await self.load_tensors(read_checkpoint(directory))

    async def _begin(self, manifest: WeightManifest) -> None:
        self._tensors = {}

    async def _load_tensors(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        def copy() -> None:
            for name, tensor in tensors:
                self._tensors[name] = tensor.detach().to("cpu", copy=True)  # the sender reuses its memory

        await asyncio.to_thread(copy)

    async def _finish(self, policy_version: int) -> None:
        tensors, self._tensors = self._tensors, {}

        def serve() -> None:
            with tempfile.TemporaryDirectory(prefix="chatlearn-ctranslate2-") as folder:
                directory = Path(folder) / "model"
                write_model(self._model, tensors, directory)
                self._serve_directory(directory)

        await asyncio.to_thread(serve)

    async def _die(self, reason: str, cause: BaseException | None = None) -> None:
        self._tensors = {}
        await super()._die(reason, cause)
