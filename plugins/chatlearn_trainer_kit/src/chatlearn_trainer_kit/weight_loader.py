"""The receiving side of a trainer that takes another's weights: every tensor is checked before it is placed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import BoxCover, WeightManifest, WeightShard
from chatlearn_core.types.boxes import box_text, extent, full_box

_MAX_LINES = 10
"""Differences or missing tensors that an error lists; it counts the rest."""


class TrainerWeightLoader(ABC):
    """Implements ``WeightLoader``, channels ``tensors`` and ``boxes``, for one rank of a trainer.

    Names and shapes are checked against the manifest, and each element must arrive exactly once: a moving average is
    wrong if a weight is blended twice. A sync that failed may have changed a part of the weights; ``_fail`` says so to
    the trainer. The next ``begin`` starts anew.
    """

    def __init__(self, name: str, expected: WeightManifest) -> None:
        """Wait for a sync.

        Args:
            name: of the role and rank, for messages.
            expected: every tensor of the trainer's model.
        """
        self._name = name
        self._expected = expected
        self._version: int | None = None
        self._offered = expected
        self._covers: dict[str, BoxCover] = {}
        """Of the open sync, by the expected name, what has arrived."""

    # What a trainer does in its own way

    @abstractmethod
    def _begin(self) -> None:
        """Make ready for new weights; nothing has changed if this raises."""

    @abstractmethod
    def _place(self, shard: WeightShard) -> None:
        """Take what this rank holds of a box, under its expected name. The box's memory lives until this returns."""

    @abstractmethod
    def _loaded(self) -> None:
        """A call of ``load_*`` ends: what ``_place`` reads must have been read."""

    @abstractmethod
    def _finish(self) -> None:
        """Every element arrived."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """Record that the weights may match no completed step."""

    # WeightLoader

    def expected_manifest(self) -> WeightManifest:
        """See ``WeightLoader``: every tensor of the trainer's model."""
        return self._expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        """See ``WeightLoader``; dtypes may differ."""
        lines = self._expected.differences(manifest, check_dtype=False)
        if lines:
            raise WeightSyncError(
                f"{self._name} cannot take the weights of step {policy_version}: {len(lines)} tensors differ\n"
                + "\n".join(f"  {line}" for line in lines[:_MAX_LINES])
            )
        self._begin()
        self._version, self._offered, self._covers = policy_version, manifest, {}

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See ``WeightLoader``.

        Raises:
            WeightSyncError: a name or shape is not the model's, or an element came twice.
        """
        shapes = ((name, tuple(tensor.shape), tensor) for name, tensor in tensors)
        self._load(WeightShard(name, shape, full_box(shape), 0, tensor) for name, shape, tensor in shapes)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        """See ``WeightLoader``; errors as of ``load_tensors``."""
        self._load(shards)

    async def load_checkpoint(self, directory: Path) -> None:
        """Not a channel of trainers: ``load_model`` reads directories."""
        raise WeightSyncError(f"{self._name} takes tensors and boxes, not files ({directory})")

    async def finish(self) -> int:
        """See ``WeightLoader``."""
        if self._version is None:
            raise WeightSyncError(f"{self._name}: finish without begin")
        covers = self._covers
        missing = [
            name for name in sorted(self._expected.tensors) if name not in covers or not covers[name].is_complete
        ]
        if missing:
            more = f" and {len(missing) - _MAX_LINES} more" if len(missing) > _MAX_LINES else ""
            raise WeightSyncError(
                f"{self._name}: {len(missing)} of {len(self._expected.tensors)} tensors of step {self._version} did "
                f"not arrive whole: {', '.join(missing[:_MAX_LINES])}{more}"
            )
        self._finish()
        version, self._version = self._version, None
        return version

    async def fail(self, reason: str) -> None:
        """See ``WeightLoader``; weights of which nothing arrived are whole still."""
        changed = self._version is not None and bool(self._covers)
        self._version = None
        if changed:
            self._fail(reason)

    def _load(self, shards: Iterable[WeightShard]) -> None:
        if self._version is None:
            raise WeightSyncError(f"{self._name}: weights arrived without begin")
        for shard in shards:
            name = self._admit(shard)
            if name is not None:
                self._place(WeightShard(name, shard.global_shape, shard.box, shard.owner_rank, shard.tensor))
        self._loaded()

    def _admit(self, shard: WeightShard) -> str | None:
        """The expected name of a box; None where a tied tensor comes under its second name, beside its first."""
        name = self._expected.aliases.get(shard.name, shard.name)
        spec = self._expected.tensors.get(name)
        if spec is None:
            raise WeightSyncError(f"{self._name}: {shard.name} arrived and is no tensor of its model")
        if shard.global_shape != spec.shape or tuple(shard.tensor.shape) != extent(shard.box):
            raise WeightSyncError(
                f"{self._name}: {shard.name} has shape {list(spec.shape)}; box {box_text(shard.box)} of shape "
                f"{list(shard.global_shape)} arrived with {list(shard.tensor.shape)}"
            )
        if shard.name != name and name in self._offered.tensors:
            return None
        cover = self._covers.setdefault(name, BoxCover(spec.shape))
        refusal = cover.add(shard.box)
        if refusal is not None:
            raise WeightSyncError(f"{self._name}: {shard.name}: {refusal}")
        return name


def blend(source: Tensor, target: Tensor, decay: float) -> None:
    """Set ``target = decay * target + (1 - decay) * source``, in the target's dtype and on its device;
    decay 0 copies.
    """
    if decay == 0.0 or not target.is_floating_point():
        target.copy_(source)
    else:
        target.mul_(decay).add_(source.to(target.device, target.dtype), alpha=1 - decay)
