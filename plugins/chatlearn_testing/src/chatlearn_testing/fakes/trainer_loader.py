"""The weight loader of a ``FakeTrainer`` that follows another trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightManifest, WeightShard


class FakeTrainerLoader:
    """Implements ``WeightLoader`` for tensors and boxes: collects the sum of what arrives, then blends it at once.

    Args:
        manifest: manifest of the trainer.
        finish: called with the whole tensors when all have arrived.
        name: name for messages.
    """

    def __init__(self, manifest: WeightManifest, finish: Callable[[Mapping[str, Tensor]], None], name: str) -> None:
        self._manifest = manifest
        self._finish = finish
        self._name = name
        self._version: int | None = None
        self._arrived: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def expected_manifest(self) -> WeightManifest:
        return self._manifest

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        lines = self._manifest.differences(manifest)
        if lines:
            raise WeightSyncError(f"{self._name} cannot take the weights of step {policy_version}: {'; '.join(lines)}")
        self._version, self._arrived = policy_version, {}
        self._missing = {name: spec.num_elements for name, spec in self._manifest.tensors.items()}

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            shape = tuple(tensor.shape)
            await self.load_boxes([WeightShard(name, shape, tuple((0, size) for size in shape), 0, tensor)])

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        if self._version is None:
            raise WeightSyncError(f"{self._name}: weights arrived without begin")
        for shard in shards:
            spec = self._manifest.tensors.get(shard.name)
            if spec is None or shard.global_shape != spec.shape:
                raise WeightSyncError(
                    f"{self._name}: {shard.name} {list(shard.global_shape)} is not a tensor of its model"
                )
            self._missing[shard.name] -= shard.tensor.numel()
            if self._missing[shard.name] < 0:
                raise WeightSyncError(f"{self._name}: {shard.name}: elements came twice")
            whole = self._arrived.setdefault(shard.name, shard.tensor.new_full(spec.shape, float("nan")))
            whole[tuple(slice(start, stop) for start, stop in shard.box)] = shard.tensor

    async def load_checkpoint(self, directory: Path) -> None:
        raise WeightSyncError(f"{self._name} takes no files ({directory}); channels are tensors and boxes")

    async def finish(self) -> int:
        missing = [name for name, count in self._missing.items() if count]
        if self._version is None or missing:
            raise WeightSyncError(f"{self._name}: tensors did not arrive whole: {', '.join(missing) or 'no begin'}")
        self._finish(self._arrived)
        version, self._version, self._arrived = self._version, None, {}
        return version

    async def fail(self, reason: str) -> None:
        self._version, self._arrived = None, {}
