"""The base of rewards that are pure and fast, and run in the caller's process."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chatlearn_core.protocols import MemoryPart
from chatlearn_core.types import RewardResult, Sample


class InlineReward:
    """Needs no setup and holds no resources; a subclass judges one sample at a time."""

    def setup(self) -> None:
        """Nothing to start."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order."""
        return [self.judge(sample) for sample in samples]

    def judge(self, sample: Sample) -> RewardResult:
        """Return the result of one sample."""
        raise NotImplementedError

    def health(self) -> str | None:
        return None

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def close(self) -> None:
        """Nothing to release."""


def failed(reward: str, role: str, sample: Sample, problem: str) -> RewardResult:
    """Return the result of a sample that cannot be judged because of its prompt's row."""
    return RewardResult(None, error=f"reward {reward!r} of role {role!r}: prompt {sample.prompt.id!r} {problem}")
