"""One worker of a reward role, in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from chatlearn_core.protocols import MemoryPart
from chatlearn_core.runtime.rewards import CombinedReward, RewardPart
from chatlearn_core.types import RewardResult, Sample
from chatlearn_ray.travelling import FreshSample, fetched_samples
from chatlearn_ray.worker import Worker, WorkerFacts
from chatlearn_ray.worker_spec import WorkerSpec


class RewardWorker(Worker):
    """One worker of a reward role: all its parts, combined."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._group = CombinedReward(self.context.role, (), spec.timeout_s)

    async def setup(self) -> WorkerFacts:
        """Build and start every part."""
        parts: list[RewardPart] = []
        for share in self.spec.shares:
            reward = self.build(share.plugin)
            parts.append(RewardPart(share.name, reward, share.weight, share.data_sources, share.unit))
            self._group = CombinedReward(self.context.role, parts, self.spec.timeout_s)
            await self.set_up(reward.setup)
        return self.facts()

    async def score(self, samples: Sequence[Sample | FreshSample]) -> list[RewardResult]:
        return await self._group.score(await asyncio.to_thread(fetched_samples, samples))

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.offload(parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        await self._group.onload(parts)

    async def close(self) -> None:
        """Close every part."""
        group, self._group = self._group, CombinedReward(self.context.role, (), 1.0)
        await self.close_all([part.reward.close for part in group.parts])
