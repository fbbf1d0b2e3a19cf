"""Reward ``process``: rewards of the steps of a completion."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import OutputRequest, RewardResult, Sample, pack_samples
from chatlearn_rewards.arithmetic import equations_hold
from chatlearn_rewards.completion_steps import StepTokens, split_steps
from chatlearn_rewards.process_options import ProcessOptions
from chatlearn_rewards.reward_role import RewardRole

Span = tuple[int, int]
"""Start and stop of a step in the text of a completion, characters."""


class ProcessReward(RewardRole):
    """Splits completions into steps and rewards each, by a rule or a reward model.

    A reward model is causal, so its score of the tokens up to the end of a step is what a head at every token would
    give at that token. Each group is one call, so that scores do not depend on timing.
    """

    def __init__(self, options: ProcessOptions, context: RoleContext) -> None:
        if options.rule == "model" and "model" not in context.handles:
            raise ConfigError(
                f"reward 'process' of role {context.role!r} has no model: set uses: {{model: <trainer role with head "
                "reward>}}, or rule: arithmetic"
            )
        self._options = options
        self._model = context.handles.get("model") if options.rule == "model" else None
        self._tokens = StepTokens(context.load_tokenizer, f"reward 'process' of role {context.role!r}")

    def setup(self) -> None:
        """Load the tokenizer where rewards go to tokens."""
        if self._options.give == "steps" or self._model is not None:
            self._tokens.load()
        super().setup()

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Components ``steps`` (how many are rewarded) and ``step_mean`` (mean reward, 0 without a step).

        Raises:
            BackendError: the model did not answer.
        """
        groups: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.group_id, []).append(index)
        results: dict[int, RewardResult] = {}

        async def group(indices: list[int]) -> None:
            results.update(zip(indices, await self._group([samples[i] for i in indices]), strict=True))

        await asyncio.gather(*(group(indices) for indices in groups.values()))
        return [results[index] for index in range(len(samples))]

    async def _group(self, samples: Sequence[Sample]) -> list[RewardResult]:
        spans = [split_steps(sample.text, self._options.delimiter) for sample in samples]
        problems: dict[int, str] = {}
        for index, of_sample in enumerate(spans):
            if len(of_sample) > self._options.max_steps:
                problems[index] = f"it has {len(of_sample)} steps, more than max_steps, {self._options.max_steps}"
        rewards: list[list[float | None]]
        if self._model is None:
            rewards = [
                [self._by_rule(sample.text[start:stop]) for start, stop in of_sample]
                for sample, of_sample in zip(samples, spans, strict=True)
            ]
        else:
            rewards = await self._by_model(samples, spans, problems)
        return [
            RewardResult(None, error=problems[index])
            if index in problems
            else await asyncio.to_thread(self._result, sample, spans[index], rewards[index])
            for index, sample in enumerate(samples)
        ]

    def _by_rule(self, step: str) -> float | None:
        held = equations_hold(step)
        return self._options.unchecked if held is None else self._options.correct if held else self._options.incorrect

    async def _by_model(
        self, samples: Sequence[Sample], spans: Sequence[Sequence[Span]], problems: dict[int, str]
    ) -> list[list[float | None]]:
        """Scores of all prefixes of a group, in one batch; adds to ``problems`` what cannot be scored."""
        assert self._model is not None
        rewards: list[list[float | None]] = [[None] * len(of_sample) for of_sample in spans]
        prefixes: list[Sample] = []
        places: list[tuple[int, int]] = []
        for index, sample in enumerate(samples):
            if index in problems or not spans[index]:
                continue
            if len(sample.token_ids) > self._model.max_length:
                length, longest = len(sample.token_ids), self._model.max_length
                problems[index] = f"it has {length} tokens, and role {self._model.role!r} takes {longest}"
                continue
            try:
                ends = await asyncio.to_thread(self._tokens.ends, sample, [stop for _, stop in spans[index]])
            except DataError as error:
                problems[index] = str(error)
                continue
            for number, end in enumerate(ends):
                places.append((index, number))
                prefixes.append(_prefix(sample, end, number))
        if prefixes:
            outputs = await self._model.compute(pack_samples(prefixes), OutputRequest(frozenset({"scores"}), 1.0))
            for (index, number), score in zip(places, outputs["scores"].tolist(), strict=True):
                if not math.isfinite(score):
                    problems[index] = f"the score of step {number} by role {self._model.role!r} is {score}"
                    continue
                rewards[index][number] = (
                    1.0 / (1.0 + math.exp(-max(-700.0, min(700.0, score))))
                    if self._options.transform == "sigmoid"
                    else float(score)
                )
        return rewards

    def _result(self, sample: Sample, spans: Sequence[Span], rewards: Sequence[float | None]) -> RewardResult:
        steps = [(stop, reward) for (_, stop), reward in zip(spans, rewards, strict=True) if reward is not None]
        values = [reward for _, reward in steps]
        components = {"steps": float(len(values)), "step_mean": fmean(values) if values else 0.0}
        if self._options.give == "steps":
            try:
                return self._tokens.result(sample, steps, components=components)
            except DataError as error:
                return RewardResult(None, error=str(error))
        return RewardResult(self._combined(values) if values else self._options.without_steps, components)

    def _combined(self, rewards: Sequence[float]) -> float:
        """One reward of those of the steps, of which there is at least one."""
        match self._options.give:
            case "mean":
                return fmean(rewards)
            case "min":
                return min(rewards)
            case "product":
                return math.prod(rewards)
            case _:
                return rewards[-1]


def _prefix(sample: Sample, end: int, number: int) -> Sample:
    """The prompt and the completion up to token ``end``, as one sequence of a batch."""
    ids = np.asarray(sample.token_ids[: sample.num_prompt_tokens + end + 1]).astype(np.int64)
    mask = np.arange(len(ids)) >= max(1, sample.num_prompt_tokens)
    return Sample(f"{sample.id}/{number}", sample.group_id, sample.prompt, ids, mask, sample.num_prompt_tokens)
