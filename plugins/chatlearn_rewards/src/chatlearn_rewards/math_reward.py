"""Reward ``math``: mathematical equivalence, judged by math-verify in killable workers."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample
from chatlearn_rewards.ground_truths import math_problem
from chatlearn_rewards.options import MathOptions
from chatlearn_rewards.pooled_reward import PooledReward
from chatlearn_rewards.process_pool import Outcome, Task


class MathReward(PooledReward):
    """Compares the last ``\\boxed{}`` of a completion, or its last expression, with the ground truth."""

    def __init__(self, options: MathOptions, context: RoleContext) -> None:
        arguments = {"require_boxed": options.require_boxed, "strict": options.strict}
        task = Task("chatlearn_rewards.math_grading:build_math_grader", arguments)
        super().__init__("math", task, options, context)
        self._options = options
        self._role = context.role

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """``accuracy`` is 1 or 0; a row without a ground truth is an error that names the prompt."""
        results: list[RewardResult] = []
        judged: list[int] = []
        payloads: list[tuple[str, str]] = []
        for index, sample in enumerate(samples):
            truth = sample.prompt.ground_truth
            problem = math_problem(self._options, truth)
            if problem is None:
                judged.append(index)
                payloads.append((sample.text, str(truth).strip()))
            where = f"reward 'math' of role {self._role!r}: prompt {sample.prompt.id!r}"
            results.append(RewardResult(None, error=f"{where} {problem}"))
        for index, outcome in zip(judged, await self._pool.run(payloads), strict=True):
            results[index] = self._result(outcome)
        return results

    def _result(self, outcome: Outcome) -> RewardResult:
        if outcome.exhausted and self._options.ungraded == "wrong":
            return RewardResult(self._options.incorrect, {"accuracy": 0.0, UNGRADED: 1.0})
        if outcome.error is not None:
            return RewardResult(None, error=outcome.error)
        right = bool(outcome.value["right"])
        return RewardResult(
            self._options.correct if right else self._options.incorrect,
            {"accuracy": 1.0 if right else 0.0},
            answer=outcome.value["answer"],
        )
