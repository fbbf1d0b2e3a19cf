"""Taking new weights into a live model, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from chatlearn_core.exceptions import ChatLearnError, ModelError, WeightSyncError
from chatlearn_core.types import WeightManifest, WeightShard
from chatlearn_hf.checkpoint_names import (
    CheckpointLayout,
    checkpoint_layout,
    checkpoint_views,
    dtype_name,
    expected_manifest,
    load_checkpoint_tensors,
)
from chatlearn_hf.model_directory import weight_files

_MAX_LINES = 10
"""Differences that an error lists; it counts the rest."""

T = TypeVar("T")


class Replica(Protocol):
    """What a loader needs of its generator."""

    @property
    def name(self) -> str:
        """For messages: role and replica."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def weights_are_offloaded(self) -> bool: ...

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
        self._convert_dtype = convert_dtype
        self._layout: CheckpointLayout = checkpoint_layout(model)
        self._expected = expected_manifest(model_path, dtype)
        self._version: int | None = None
        self._offered: WeightManifest | None = None
        self._views: dict[str, Tensor] = {}
        self._arrived: set[str] = set()

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: the model directory's tensors, in the dtype held here."""
        return self._expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``. Requests that run are kept: they wait and go on after ``finish``."""
        name = self._replica.name
        if self._replica.is_dead:
            raise WeightSyncError(f"{name} is dead; restart it before the sync of version {policy_version}")
        if self._version is not None:
            raise WeightSyncError(
                f"{name} is loading version {self._version}; finish or fail that before version {policy_version}"
            )
        if self._replica.weights_are_offloaded:
            raise WeightSyncError(f"{name} has its weights offloaded; onload 'weights' before version {policy_version}")
        lines = self._expected.differences(manifest, check_dtype=not self._convert_dtype)
        if lines:
            shown = "\n".join(f"  {line}" for line in lines[:_MAX_LINES])
            more = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
            hint = "" if self._convert_dtype else "; a dtype may differ with the generator's option sync_dtype: convert"
            raise WeightSyncError(
                f"{name} cannot take policy version {policy_version}: {len(lines)} tensors differ from the model "
                f"directory{hint}\n{shown}{more}"
            )
        await self._replica.stop_serving()
        self._views = checkpoint_views(self._model, self._layout)
        self._version, self._offered, self._arrived = policy_version, manifest, set()

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``.

        Raises:
            WeightSyncError: a name, shape or dtype is not what ``begin`` announced, or a name came twice; the replica
                is dead, since part of its weights may have changed.
        """
        self._require_begun("load_tensors")
        try:
            await self._replica.in_worker(
                lambda: load_checkpoint_tensors(self._model, self._checked(tensors), views=self._views)
            )
        except Exception as error:
            await self._die(f"loading tensors failed: {type(error).__name__}: {error}", error)
            if isinstance(error, ChatLearnError):
                raise
            raise WeightSyncError(
                f"{self._replica.name}: loading tensors failed after {len(self._arrived)} of "
                f"{len(self._expected.tensors)}: {type(error).__name__}: {error}"
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
        await self.load_tensors(_read_checkpoint(directory))

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        version = self._require_begun("finish")
        missing = sorted(self._expected.tensors.keys() - self._arrived)
        if missing:
            shown = ", ".join(missing[:_MAX_LINES])
            more = f" and {len(missing) - _MAX_LINES} more" if len(missing) > _MAX_LINES else ""
            problem = (
                f"{len(missing)} of {len(self._expected.tensors)} tensors of policy version {version} did not arrive: "
                f"{shown}{more}"
            )
            await self._die(problem)
            raise WeightSyncError(f"{self._replica.name}: {problem}; the replica is dead, restart it")
        self._close()
        await self._replica.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``."""
        await self._die(reason)

    def _checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as announced, each once, under the names of the manifest."""
        assert self._offered is not None
        for offered_name, tensor in tensors:
            name = self._expected.aliases.get(offered_name, offered_name)
            spec = self._offered.tensors.get(self._offered.aliases.get(offered_name, offered_name))
            if spec is None or name not in self._expected.tensors:
                raise WeightSyncError(f"{offered_name}: arrived, but the manifest did not announce it")
            if tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(f"{name}: shape {list(tensor.shape)} arrived, {list(spec.shape)} announced")
            if dtype_name(tensor.dtype) != spec.dtype:
                raise WeightSyncError(f"{name}: dtype {dtype_name(tensor.dtype)} arrived, {spec.dtype} announced")
            if offered_name != name and name in self._offered.tensors:
                continue  # a tied tensor under its second name, beside its first
            if name in self._arrived:
                raise WeightSyncError(f"{name}: arrived twice")
            self._arrived.add(name)
            yield name, tensor

    def _require_begun(self, method: str) -> int:
        if self._version is None:
            raise WeightSyncError(f"{self._replica.name}: {method} without begin")
        return self._version

    def _close(self) -> None:
        self._version, self._offered, self._views = None, None, {}

    async def _die(self, reason: str, cause: BaseException | None = None) -> None:
        self._close()
        await self._replica.die(reason, cause)


def _read_checkpoint(directory: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        files = weight_files(directory)
    except (ModelError, OSError) as error:
        raise WeightSyncError(f"checkpoint {directory} cannot be read: {error}") from error
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  # a safetensors handle cannot be iterated
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise WeightSyncError(f"{file} is cut short or not a safetensors file: {error}") from error
