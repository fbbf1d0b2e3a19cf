"""GRPO with process supervision against a loop written from arXiv 2402.03300, section 4.1.3."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_algorithms.dapo import DAPO
from chatlearn_algorithms.grpo import GRPO
from chatlearn_algorithms.grpo_options import DAPOOptions, GRPOOptions
from chatlearn_algorithms.ppo import PPO
from chatlearn_algorithms.ppo_options import PPOOptions
from chatlearn_algorithms.reinforce_options import ReinforcePPOptions
from chatlearn_algorithms.reinforce_pp import ReinforcePP
from chatlearn_core.protocols import SequenceBuilder
from chatlearn_core.types import (
    Completion,
    Derived,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    VersionSpan,
    scored_batch,
)

Steps = Sequence[tuple[int, float]]
"""(position of a step's last token in the completion, its reward)"""
EPSILON = 1e-5


def rewarded(sample: Sample, steps: Steps, outcome: float = 0.0) -> Sample:
    values = np.zeros(sample.num_completion_tokens, np.float32)
    values[[end for end, _ in steps]] = [value for _, value in steps]
    ends = np.array([end for end, _ in steps], np.int64)
    sample.reward = RewardResult(outcome, token_values=values, step_ends=ends)
    return sample


def by_the_paper(lengths: Sequence[int], steps: Sequence[Steps]) -> list[list[float]]:
    """A^_i,t = sum over index(j) >= t of (r_i^index(j) - mean(R)) / std(R), token by token."""
    everything = [value for of_output in steps for _, value in of_output]
    mean, deviation = statistics.fmean(everything), statistics.pstdev(everything)
    return [
        [sum((value - mean) / (deviation + EPSILON) for index, value in of_output if index >= t) for t in range(length)]
        for length, of_output in zip(lengths, steps, strict=True)
    ]


def derive(samples: list[Sample], make_context: Any, **options: Any) -> tuple[TrainBatch, Derived]:
    batch = scored_batch(samples)
    return batch, GRPO(GRPOOptions(supervision="process", **options), make_context()).advantages(batch, 1)


def completions(batch: TrainBatch, values: torch.Tensor, num_prompt: int = 3) -> list[list[float]]:
    return [row[num_prompt:].tolist() for row in values.split(batch.lengths)]


LENGTHS = [6, 4, 5]
STEPS: list[Steps] = [[(1, 0.9), (4, 0.2), (5, 0.0)], [(3, 1.0)], [(0, 0.25), (2, 0.5)]]


def played(index: int, lengths: Sequence[int], rewards: Sequence[float]) -> Sample:
    """A rollout of turns of these lengths, each with a reward, and an observed token after each but the last."""
    sequence = SequenceBuilder(f"a#{index}", "a", Prompt("a", np.array([1, 2, 3]), "?"), "a")
    for turn, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        if turn:
            sequence.observed([9])
        sampling, spans = SamplingParams(8), (VersionSpan(0, length, 0),)
        ids, zeros = np.full(length, 5), np.zeros(length, np.float32)
        sequence.sampled(Completion(f"a#{index}/{turn}", ids, zeros, sampling.basis, "stop", sampling, spans))
        sequence.rewarded(reward)
    return sequence.finished()


def test_rewards_of_an_environments_turns_are_rewards_of_steps(make_context: Any) -> None:
    batch, derived = derive([played(0, [2, 1, 3], [0.9, 0.0, 0.2]), played(1, [4, 2], [1.0, -0.5])], make_context)
    steps: list[Steps] = [[(1, 0.9), (3, 0.0), (7, 0.2)], [(3, 1.0), (6, -0.5)]]
    observed = [{2, 4}, {4}]
    for found, wanted, others in zip(
        completions(batch, derived.token_data["advantages"]), by_the_paper([8, 7], steps), observed, strict=True
    ):
        masked = [0.0 if t in others else value for t, value in enumerate(wanted)]
        assert found == pytest.approx(masked, rel=1e-6, abs=1e-7)
    assert derived.metrics["reward_steps"].value == pytest.approx(5 / 2)


def test_advantages_are_those_of_the_paper(make_group: Any, make_context: Any) -> None:
    first = make_group("a", [0.0] * 3, lengths=LENGTHS)
    second = make_group("b", [0.0] * 2, lengths=[2, 2])
    other: list[Steps] = [[(1, 5.0)], [(1, -5.0)]]
    samples = [rewarded(*pair) for pair in zip([*first, *second], [*STEPS, *other], strict=True)]
    batch, derived = derive(samples, make_context)
    expected = [*by_the_paper(LENGTHS, STEPS), *by_the_paper([2, 2], other)]
    for found, wanted in zip(completions(batch, derived.token_data["advantages"]), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    assert derived.metrics["reward_steps"].value == pytest.approx(8 / 5)
    for row, start in zip(derived.token_data["advantages"].split(batch.lengths), [3] * 5, strict=True):
        assert not row[:start].any()


def test_a_step_of_reward_zero_counts(make_group: Any, make_context: Any) -> None:
    """0 is below the mean: what sets steps apart is that they are steps, not that their rewards differ from 0."""
    samples = make_group("a", [0.0, 0.0], lengths=[3, 3])
    steps: list[Steps] = [[(0, 0.0), (2, 1.0)], [(0, 0.0), (2, 0.0)]]
    batch, derived = derive([rewarded(*pair) for pair in zip(samples, steps, strict=True)], make_context)
    low, high = -0.25 / (math.sqrt(3 / 16) + EPSILON), 0.75 / (math.sqrt(3 / 16) + EPSILON)
    first, second = completions(batch, derived.token_data["advantages"])
    assert first == pytest.approx([low + high, high, high])
    assert second == pytest.approx([2 * low, low, low])


def test_outcomes_are_normalised_apart_and_added(make_group: Any, make_context: Any) -> None:
    samples = make_group("a", [0.0] * 3, lengths=LENGTHS)
    outcomes = [1.0, 0.0, 0.0]
    scored = [rewarded(*each) for each in zip(samples, STEPS, outcomes, strict=True)]
    batch, derived = derive(scored, make_context)
    deviation = statistics.pstdev(outcomes) + EPSILON
    for found, wanted, outcome in zip(
        completions(batch, derived.token_data["advantages"]), by_the_paper(LENGTHS, STEPS), outcomes, strict=True
    ):
        shift = (outcome - 1 / 3) / deviation
        assert found == pytest.approx([value + shift for value in wanted], rel=1e-5, abs=1e-6)


def test_groups_without_any_difference_are_dropped(make_group: Any, make_context: Any) -> None:
    equal = [rewarded(one, [(0, 0.5), (1, 0.5)]) for one in make_group("a", [0.0] * 2, lengths=[2, 2])]
    numbers = [[(0, 0.5)], [(0, 0.5), (1, 0.5)]]
    more = [rewarded(*pair) for pair in zip(make_group("b", [0.0] * 2, lengths=[2, 2]), numbers, strict=True)]
    orders: list[Steps] = [[(0, 1.0), (1, 0.0)], [(0, 0.0), (1, 1.0)]]
    kept = [rewarded(*pair) for pair in zip(make_group("c", [0.0] * 2, lengths=[2, 2]), orders, strict=True)]
    batch, derived = derive([*equal, *more, *kept], make_context, drop_zero_spread_groups=True)
    assert set(derived.exclusions.values()) == {"zero_spread_group"}
    assert sorted(derived.exclusions) == [sample.id for sample in [*equal, *more]]
    assert derived.metrics["zero_spread_groups"].value == pytest.approx(2 / 3)
    rows = completions(batch, derived.token_data["advantages"])
    assert [row == [0.0, 0.0] for row in rows] == [True, True, True, True, False, False]


def test_samples_without_steps_have_the_advantage_of_their_outcome(make_group: Any, make_context: Any) -> None:
    samples = make_group("a", [1.0, 0.0, 0.0], lengths=[2, 2, 2])
    batch = scored_batch(samples)
    process = GRPO(GRPOOptions(supervision="process"), make_context()).advantages(batch, 1)
    outcome = GRPO(GRPOOptions(), make_context()).advantages(batch, 1)
    assert torch.equal(process.token_data["advantages"], outcome.token_data["advantages"])


def test_other_group_algorithms_add_steps_to_the_outcome(make_group: Any, make_context: Any) -> None:
    scored = [rewarded(*pair) for pair in zip(make_group("a", [0.0] * 3, lengths=LENGTHS), STEPS, strict=True)]
    sums = [sum(np.float32(value) for _, value in of_output) for of_output in STEPS]
    mean, deviation = statistics.fmean(sums), statistics.pstdev(sums) + EPSILON
    for algorithm in (GRPO(GRPOOptions(), make_context()), DAPO(DAPOOptions(), make_context())):
        batch = scored_batch(scored)
        rows = completions(batch, algorithm.advantages(batch, 1).token_data["advantages"])
        assert [row[0] for row in rows] == pytest.approx([(one - mean) / deviation for one in sums], rel=1e-5)


def test_token_returns_of_reinforce_pp_have_the_steps_where_they_end(make_group: Any, make_context: Any) -> None:
    scored = [rewarded(*pair) for pair in zip(make_group("a", [0.0] * 3, lengths=LENGTHS), STEPS, strict=True)]
    batch, gamma = scored_batch(scored), 0.9
    algorithm = ReinforcePP(ReinforcePPOptions(gamma=gamma, kl_coef=0.0), make_context())
    found = completions(batch, algorithm.advantages(batch, 1).token_data["advantages"])
    returns = [
        [sum(gamma ** (end - t) * value for end, value in of_output if end >= t) for t in range(length)]
        for length, of_output in zip(LENGTHS, STEPS, strict=True)
    ]
    flat = [value for row in returns for value in row]
    mean, deviation = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    for row, wanted in zip(found, returns, strict=True):
        assert row == pytest.approx([(value - mean) / deviation for value in wanted], abs=1e-5)


def test_gae_of_ppo_has_the_steps_where_they_end(make_group: Any, make_context: Any) -> None:
    scored = [rewarded(*pair) for pair in zip(make_group("a", [0.0] * 3, lengths=LENGTHS), STEPS, strict=True)]
    batch, gamma, lam = scored_batch(scored), 0.95, 0.8
    generator = torch.Generator().manual_seed(1)
    batch.token_data["critic_values"] = torch.rand(batch.num_tokens, generator=generator)
    options = PPOOptions(gamma=gamma, gae_lambda=lam, kl_coef=0.0, whiten_advantages=False)
    derived = PPO(options, make_context(critic="trainer")).advantages(batch, 1)
    values = completions(batch, batch.token_data["critic_values"])
    for found, value, of_output in zip(
        completions(batch, derived.token_data["advantages"]), values, STEPS, strict=True
    ):
        rewards, advantage, wanted = dict(of_output), 0.0, []
        for t in reversed(range(len(value))):
            following = value[t + 1] if t + 1 < len(value) else 0.0
            advantage = rewards.get(t, 0.0) + gamma * following - value[t] + gamma * lam * advantage
            wanted.append(advantage)
        assert found == pytest.approx(wanted[::-1], abs=1e-5)
