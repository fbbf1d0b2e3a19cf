"""The base of rewards that are pure and fast, and run in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.reward_role import RewardRole


class InlineReward(RewardRole):
    """Needs no setup and holds no resources; a subclass judges one sample at a time."""

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        return [self.judge(sample) for sample in samples]

    def judge(self, sample: Sample) -> RewardResult:
        """Return the result of one sample."""
        raise NotImplementedError


def failed(reward: str, role: str, sample: Sample, problem: str) -> RewardResult:
    """Return the result of a sample that cannot be judged because of its prompt's row."""
    return RewardResult(None, error=f"reward {reward!r} of role {role!r}: prompt {sample.prompt.id!r} {problem}")
