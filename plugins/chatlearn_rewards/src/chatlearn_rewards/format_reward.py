"""Reward ``format``: whether a completion matches a regular expression."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample
from chatlearn_rewards.options import FormatOptions
from chatlearn_rewards.pooled_reward import PooledReward
from chatlearn_rewards.process_pool import Outcome, Task


class FormatReward(PooledReward):
    """Matches in worker processes, which are killed at the time limit if a pattern backtracks endlessly."""

    def __init__(self, options: FormatOptions, context: RoleContext) -> None:
        arguments = {"pattern": options.pattern, "match": options.match, "flags": list(options.flags)}
        super().__init__("format", Task("chatlearn_rewards.format_matching:build_matcher", arguments), options, context)
        self._options = options

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Component ``format`` is 1 or 0."""
        return [self._result(outcome) for outcome in await self._pool.run([s.text for s in samples])]

    def _result(self, outcome: Outcome) -> RewardResult:
        if outcome.exhausted and self._options.ungraded == "wrong":
            return RewardResult(self._options.unmatched, {"format": 0.0, UNGRADED: 1.0})
        if outcome.error is not None:
            return RewardResult(None, error=outcome.error)
        return RewardResult(
            self._options.matched if outcome.value else self._options.unmatched, {"format": float(outcome.value)}
        )
