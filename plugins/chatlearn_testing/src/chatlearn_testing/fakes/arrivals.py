"""Compares the tensors that a fake transport moves in one sync with the plan's manifest."""

from __future__ import annotations

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import SyncRequest, WeightShard
from chatlearn_core.types.boxes import lies_in


class Arrivals:
    """Counts the elements of every tensor that the transport has moved."""

    def __init__(self, plan: SyncRequest, who: str) -> None:
        self._manifest = plan.manifest
        self._where = f"weight sync {plan.sync_id!r}, {who}"
        self._missing = {name: spec.num_elements for name, spec in plan.manifest.tensors.items()}
        self._seen: set[tuple[str, object]] = set()

    def admit(self, shard: WeightShard) -> None:
        """Check and count a shard.

        Raises:
            WeightSyncError: its name, shape or dtype was not announced, or it came before.
        """
        spec = self._manifest.tensors.get(shard.name)
        if spec is None:
            raise WeightSyncError(f"{self._where}: tensor {shard.name!r} is not in the manifest")
        dtype = str(shard.tensor.dtype).removeprefix("torch.")
        extent = tuple(stop - start for start, stop in shard.box)
        lies_inside = lies_in(shard.box, spec.shape)
        if (
            not lies_inside
            or shard.global_shape != spec.shape
            or tuple(shard.tensor.shape) != extent
            or dtype != spec.dtype
        ):
            raise WeightSyncError(
                f"{self._where}: tensor {shard.name!r} is {dtype} {list(shard.tensor.shape)} (box {shard.box} of"
                f" {list(shard.global_shape)}), the manifest says {spec.dtype} {list(spec.shape)}"
            )
        if (shard.name, shard.box) in self._seen:
            raise WeightSyncError(f"{self._where}: tensor {shard.name!r} came twice")
        self._seen.add((shard.name, shard.box))
        self._missing[shard.name] -= shard.tensor.numel()

    def admit_whole(self, name: str, tensor: Tensor) -> None:
        """``admit`` for a whole tensor."""
        shape = tuple(tensor.shape)
        self.admit(WeightShard(name, shape, tuple((0, size) for size in shape), 0, tensor))

    def require_all(self) -> None:
        """Raise ``WeightSyncError`` unless every element of every tensor has been counted."""
        missing = [name for name, count in self._missing.items() if count]
        if missing:
            raise WeightSyncError(f"{self._where}: these tensors did not arrive whole: {', '.join(missing)}")
