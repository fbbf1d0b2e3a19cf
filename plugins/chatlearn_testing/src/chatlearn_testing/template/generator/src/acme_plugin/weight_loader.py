"""Loads new weights into the generator ``acme``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import ReplicaState, WeightManifest, WeightShard
from torch import Tensor

from acme_plugin.model import Weights


class Replica(Protocol):
    """The interface of its generator that the loader uses."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> ReplicaState: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def weights_are_offloaded(self) -> bool: ...

    def stop_serving(self) -> None: ...

    def serve(self, policy_version: int) -> None: ...

    def die(self, reason: str) -> None: ...


class AcmeWeightLoader:
    """Copies whole tensors into the live model, and serves the new version when all have arrived.

    Implements ``chatlearn_core.protocols.WeightLoader`` with the channel ``tensors``. Whatever goes wrong after
    ``begin`` leaves the replica dead: it may hold parts of two versions.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._expected = WeightManifest({})
        self._version: int | None = None
        self._arrived: set[str] = set()

    def expect(self, manifest: WeightManifest) -> None:
        """The tensors of the model directory."""
        self._expected = manifest

    def expected_manifest(self) -> WeightManifest:
        return self._expected

    async def begin(self, policy_version: int, manifest: WeightManifest) -> None:
        where = f"{self._replica.name} cannot take policy version {policy_version}"
        if self._replica.state == "dead" or self._version is not None:
            raise WeightSyncError(f"{where}: it is {self._replica.state}; restart it, or end the sync that is open")
        if self._replica.weights_are_offloaded:
            raise WeightSyncError(f"{where}: its weights are offloaded; onload them first")
        if differences := self._expected.differences(manifest):
            raise WeightSyncError(f"{where}: {'; '.join(differences)}")
        self._replica.stop_serving()
        self._version, self._arrived = policy_version, set()

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._version is None:
            raise WeightSyncError(f"{self._replica.name}: tensors arrived without begin")
        for name, tensor in tensors:
            live = self._replica.weights.get(name)
            if live is None:
                await self._refuse(f"{name}: arrived, but the model has no tensor of that name")
            elif live.shape != tensor.shape or live.dtype != tensor.dtype:
                await self._refuse(
                    f"{name}: {list(tensor.shape)} {tensor.dtype} arrived, "
                    f"the model has {list(live.shape)} {live.dtype}"
                )
            elif name in self._arrived:
                await self._refuse(f"{name}: arrived twice")
            else:
                live.copy_(tensor)
                self._arrived.add(name)

    async def load_boxes(self, shards: Iterable[WeightShard]) -> None:
        await self._refuse("it takes whole tensors (channel 'tensors'), no boxes; choose another weight_sync.backend")

    async def load_checkpoint(self, directory: Path) -> None:
        await self._refuse("it takes tensors (channel 'tensors'), no directory; choose another weight_sync.backend")

    async def finish(self) -> int:
        if self._version is None:
            raise WeightSyncError(f"{self._replica.name}: finish without begin")
        if missing := sorted(self._expected.tensors.keys() - self._arrived):
            await self._refuse(f"tensors of policy version {self._version} did not arrive: {', '.join(missing)}")
        version, self._version = self._version, None
        self._replica.serve(version)
        return version

    async def fail(self, reason: str) -> None:
        self._version = None
        self._replica.die(reason)

    async def _refuse(self, problem: str) -> None:
        await self.fail(problem)
        raise WeightSyncError(f"{self._replica.name}: {problem}; the replica is dead until it is restarted")
