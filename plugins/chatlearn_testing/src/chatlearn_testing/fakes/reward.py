"""A reward that depends only on a completion's token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_testing.fakes.options import FakeRewardOptions


class FakeReward:
    """The fraction of the completion's tokens that equal ``options.target``."""

    def __init__(self, options: FakeRewardOptions, context: RoleContext) -> None:
        self.options = options
        self.context = context
        self._ready = False

    def setup(self) -> None:
        self._ready = True

    def health(self) -> str | None:
        return None if self._ready else "not set up, or closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def close(self) -> None:
        self._ready = False

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return the fraction, or an error for an empty completion, whose fraction is undefined."""
        if self.options.blocks:
            time.sleep(self.options.seconds_per_call)
        elif self.options.seconds_per_call:
            await asyncio.sleep(self.options.seconds_per_call)
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> RewardResult:
        if not sample.num_completion_tokens:
            return RewardResult(None, error=f"sample {sample.id!r} has no completion")
        tokens = sample.completion_ids
        share = float((tokens == self.options.target).mean())
        return RewardResult(share, {"share": share})
