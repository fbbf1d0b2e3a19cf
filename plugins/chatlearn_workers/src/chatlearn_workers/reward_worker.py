"""One worker of a reward role, in its own process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from chatlearn_core.protocols import MemoryPart
from chatlearn_core.runtime.model_families import model_family
from chatlearn_core.types import RewardResult, Sample
from chatlearn_runtime_kit.rewards import CombinedReward, RewardPart
from chatlearn_runtime_kit.role_handles import RoleRequest, build_handles
from chatlearn_workers.blocks import BlockStore
from chatlearn_workers.conversation import AskingWorker, current_call
from chatlearn_workers.worker import NodeAddress, Worker, WorkerFacts
from chatlearn_workers.worker_spec import WorkerSpec


class RewardWorker(AskingWorker, Worker):
    """One worker of a reward role: all its parts, combined."""

    def __init__(self, spec: WorkerSpec, node_address: NodeAddress) -> None:
        Worker.__init__(self, spec, node_address)
        AskingWorker.__init__(self)
        self._group = CombinedReward(self.context.role, (), spec.timeout_s)

    async def setup(self) -> WorkerFacts:
        """Build and start every part."""
        parts: list[RewardPart] = []
        for share in self.spec.shares:
            handles = build_handles(self.context.role, share.uses, self.registry, _ask)
            reward = self.build(share.plugin, handles=handles, load_tokenizer=self._load_tokenizer)
            parts.append(RewardPart(share.name, reward, share.weight, share.data_sources, share.unit, share.gate))
            self._group = CombinedReward(self.context.role, parts, self.spec.timeout_s)
            await self.set_up(reward)
        return self.facts()

    def _load_tokenizer(self) -> Any:
        source = self.context.model
        assert source is not None, "a reward has the tokenizer of the run's model"
        return model_family(self.registry, source).load_tokenizer(source)

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return await self._group.score(await BlockStore().aget(samples))

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.offload(parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.onload(parts)

    async def close(self) -> None:
        """Close every part."""
        group, self._group = self._group, CombinedReward(self.context.role, (), 1.0)
        await self.close_all([part.reward.close for part in group.parts])


async def _ask(role: str, request: RoleRequest) -> Any:
    """Forward a reward's request to another role through the driver, as part of the current call."""
    return await current_call().ask(role, request)
