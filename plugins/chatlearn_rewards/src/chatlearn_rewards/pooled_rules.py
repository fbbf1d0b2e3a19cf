"""Rewards ``fuzzy_match`` and ``json_schema``: rules that may take too long and so run in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import UNGRADED, RewardResult, Sample
from chatlearn_rewards.answer_text import accepted, simplified, taken, text_problem
from chatlearn_rewards.inline_reward import failed
from chatlearn_rewards.json_checking import read_schema, schema_problem
from chatlearn_rewards.pooled_reward import PooledReward
from chatlearn_rewards.process_pool import Outcome, Task
from chatlearn_rewards.rule_options import FuzzyMatchOptions, JsonSchemaOptions


class FuzzyMatchReward(PooledReward):
    """The similarity to the ground truth, 0 to 1: 2 M / T, M characters in matching blocks of T in both texts."""

    def __init__(self, options: FuzzyMatchOptions, context: RoleContext) -> None:
        super().__init__("fuzzy_match", Task("chatlearn_rewards.fuzzy_matching:build_comparer"), options, context)
        self._options = options
        self._role = context.role

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Component ``similarity``; the reward is 0 if it is below ``threshold``."""
        results: list[RewardResult] = []
        judged: list[int] = []
        payloads: list[tuple[str, list[str]]] = []
        for index, sample in enumerate(samples):
            truth = sample.prompt.ground_truth
            wanted, text = accepted(truth), taken(sample.text, self._options.take)
            if wanted is None:
                problem = text_problem(self._options, truth)
                results.append(failed("fuzzy_match", self._role, sample, str(problem)))
                continue
            results.append(RewardResult(0.0, {"similarity": 0.0}))
            if text is not None:
                judged.append(index)
                case = self._options.ignore_case
                payloads.append((simplified(text, case=case), [simplified(one, case=case) for one in wanted]))
        for index, outcome in zip(judged, await self._pool.run(payloads), strict=True):
            results[index] = self._result(outcome)
        return results

    def _result(self, outcome: Outcome) -> RewardResult:
        if outcome.exhausted and self._options.ungraded == "wrong":
            return RewardResult(0.0, {"similarity": 0.0, UNGRADED: 1.0})
        if outcome.error is not None:
            return RewardResult(None, error=outcome.error)
        similarity = float(outcome.value)
        return RewardResult(similarity if similarity >= self._options.threshold else 0.0, {"similarity": similarity})


class JsonSchemaReward(PooledReward):
    """Whether a completion is JSON that a schema allows: the option's, or the row's ground truth."""

    def __init__(self, options: JsonSchemaOptions, context: RoleContext) -> None:
        task = Task("chatlearn_rewards.json_checking:build_checker", {"take": options.take})
        super().__init__("json_schema", task, options, context)
        self._options = options
        self._role = context.role

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Components ``json`` and ``accuracy`` are 1 or 0: whether it is JSON, and whether the schema allows it."""
        results: list[RewardResult] = []
        judged: list[int] = []
        payloads: list[dict[str, Any]] = []
        for index, sample in enumerate(samples):
            problem = row_schema_problem(self._options, sample.prompt.ground_truth)
            results.append(failed("json_schema", self._role, sample, str(problem)))
            if problem is None:
                schema = self._options.json_schema
                judged.append(index)
                schema = read_schema(sample.prompt.ground_truth) if schema is None else schema
                payloads.append({"text": sample.text, "schema": schema})
        for index, outcome in zip(judged, await self._pool.run(payloads), strict=True):
            results[index] = self._result(outcome)
        return results

    def _result(self, outcome: Outcome) -> RewardResult:
        options = self._options
        if outcome.exhausted and options.ungraded == "wrong":
            return RewardResult(options.invalid, {"json": 0.0, "accuracy": 0.0, UNGRADED: 1.0})
        if outcome.error is not None:
            return RewardResult(None, error=outcome.error)
        value = {"valid": options.valid, "invalid": options.invalid, "not_json": options.not_json}[outcome.value]
        json, right = float(outcome.value != "not_json"), float(outcome.value == "valid")
        return RewardResult(value, {"json": json, "accuracy": right})


def row_schema_problem(options: JsonSchemaOptions, ground_truth: Any) -> str | None:
    """Return why no completion can be judged by this row's schema, or None if one can."""
    if options.json_schema is not None:
        return None
    try:
        problem = schema_problem(read_schema(ground_truth))
    except ValueError as error:
        problem = f"is not JSON: {error}"
    return (
        None
        if problem is None
        else f"has a ground truth that {problem}; correct the row to a JSON Schema, or set json_schema"
    )
