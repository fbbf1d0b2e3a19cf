"""Rewards are combined by weight, routed by data source, and never trusted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import RoleLostError
from chatlearn_core.runtime.plan import RewardGate
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
)
from chatlearn_runtime_kit.rewards import CombinedReward, RewardPart


class FakeReward:
    """Returns what a function says."""

    def __init__(self, judge: Callable[[Sequence[Sample]], Any]) -> None:
        self.judge = judge
        self.seen: list[list[str]] = []
        self.offloaded: list[Any] = []

    def offload(self, parts: Any) -> None:
        self.offloaded.append(("offload", set(parts)))

    def onload(self, parts: Any) -> None:
        self.offloaded.append(("onload", set(parts)))

    async def score(self, samples: Sequence[Sample]) -> Any:
        self.seen.append([sample.id for sample in samples])
        result = self.judge(samples)
        return await result if asyncio.iscoroutine(result) else result


def constant(value: float, **components: float) -> FakeReward:
    return FakeReward(lambda samples: [RewardResult(value, dict(components)) for _ in samples])


def make_sample(number: int, source: str = "math", length: int = 2) -> Sample:
    prompt = Prompt(f"p{number}", np.array([1, 2]), "?", source)
    completion = Completion(
        "r", np.arange(length), np.zeros(length, np.float32), RAW_BASIS, "stop", SamplingParams(length), ()
    )
    return sample_from_completion(f"p{number}@1#0", f"p{number}@1", prompt, completion)


async def test_the_value_is_the_weighted_sum_and_parts_are_components() -> None:
    parts = [
        RewardPart("math", constant(1.0, accuracy=1.0), weight=2.0),
        RewardPart("format", constant(0.5, accuracy=0.0, tags=1.0), weight=-0.5),
    ]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    assert result.value == 2.0 * 1.0 - 0.5 * 0.5
    assert result.components == {"math": 1.0, "format": 0.5, "accuracy": 1.0, "tags": 1.0}
    assert result.error is None


@pytest.mark.parametrize(("at_least", "value", "counted"), [(0.5, 3.5, 1.5), (0.500001, 0.5, 0.0)])
async def test_a_part_with_a_gate_counts_where_the_other_is_high_enough(
    at_least: float, value: float, counted: float
) -> None:
    """0.5 + 2 x 1.5, or the gate's 0.5 alone; the gate looks at the value before the weight."""
    tokens = np.ones(2, np.float32)
    given = FakeReward(lambda samples: [RewardResult(1.5, {"accuracy": 1.0}, tokens)])
    parts = [
        RewardPart("correct", given, weight=2.0, gate=RewardGate(1, at_least)),
        RewardPart("format", constant(0.5)),
    ]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    assert result.value == value
    assert result.components == {"correct": counted, "format": 0.5, "accuracy": 1.0}
    assert (result.token_values is None) is (counted == 0.0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=4))
def test_any_number_of_parts_adds_up(weighted: list[tuple[float, float]]) -> None:
    parts = [RewardPart(f"part{i}", constant(value), weight) for i, (weight, value) in enumerate(weighted)]
    [result] = asyncio.run(CombinedReward("reward", parts, 30.0).score([make_sample(0)]))
    assert result.value == pytest.approx(sum(weight * value for weight, value in weighted))


async def test_a_single_part_of_weight_one_passes_through_unchanged() -> None:
    given = RewardResult(0.25, {"accuracy": 1.0}, np.array([0.0, 0.5], np.float32))
    combined = CombinedReward("reward", [RewardPart("math", FakeReward(lambda samples: [given]))], 30.0)
    [result] = await combined.score([make_sample(0)])
    assert (result.value, result.components) == (0.25, {"accuracy": 1.0})
    assert result.token_values is given.token_values


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), np.array(0.5)])
async def test_numbers_of_other_libraries_become_plain_ones(number: Any) -> None:
    """What is left in a result is written to metrics.jsonl and rollouts/, and JSON knows floats only."""
    judge = FakeReward(lambda samples: [RewardResult(number, {"accuracy": number}, torch.ones(2))])
    [result] = await CombinedReward("reward", [RewardPart("math", judge)], 30.0).score([make_sample(0)])
    assert json.dumps([result.value, result.components]) == '[0.5, {"accuracy": 0.5}]'
    assert isinstance(result.token_values, np.ndarray)


async def test_token_values_are_weighted_too() -> None:
    tokens = np.array([0.0, 1.0], np.float32)
    parts = [
        RewardPart("a", FakeReward(lambda samples: [RewardResult(1.0, {}, tokens)]), weight=0.5),
        RewardPart("b", FakeReward(lambda samples: [RewardResult(1.0, {}, tokens * 3)])),
        RewardPart("c", constant(1.0)),
    ]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    assert result.token_values is not None
    np.testing.assert_allclose(result.token_values, [0.0, 0.5 * 1 + 3])


def by_steps(values: list[float], ends: list[int]) -> FakeReward:
    found = RewardResult(0.0, token_values=np.array(values, np.float32), step_ends=np.array(ends))
    return FakeReward(lambda samples: [found])


async def test_steps_of_several_parts_are_all_steps() -> None:
    parts = [RewardPart("a", by_steps([0.5, 0.0], [0]), weight=2.0), RewardPart("b", by_steps([1.0, 0.0], [0, 1]))]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    np.testing.assert_array_equal(result.token_values, [2.0, 0.0])
    np.testing.assert_array_equal(result.step_ends, [0, 1])


async def test_rewards_of_tokens_and_of_steps_are_not_added() -> None:
    tokens = FakeReward(lambda samples: [RewardResult(1.0, {}, np.ones(2, np.float32))])
    parts = [RewardPart("a", tokens), RewardPart("b", by_steps([0.5, 0.0], [0]))]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    assert result.error == "a gives rewards of single tokens and b of steps: remove one"


@pytest.mark.parametrize(
    ("values", "ends", "error"),
    [
        (None, [0], "step_ends marks tokens, and token_values, which holds the steps' rewards there, is None"),
        ([0.0, 1.0], [0.5], "step_ends is an array of float64 of shape (1,), not of positions, [K]"),
        ([0.0, 1.0], [1, 1], "step_ends must ascend within the 2 tokens of the completion; it is [1, 1]"),
        ([0.0, 1.0], [2], "step_ends must ascend within the 2 tokens of the completion; it is [2]"),
        ([0.0, 1.0], [0], "token_values is 1 at token 1, which step_ends does not have: set it to 0 there"),
    ],
)
async def test_steps_that_are_none_are_an_error(values: Any, ends: Any, error: str) -> None:
    given = RewardResult(1.0, token_values=None if values is None else np.array(values), step_ends=np.array(ends))
    combined = CombinedReward("reward", [RewardPart("prm", FakeReward(lambda samples: [given]))], 30.0)
    [result] = await combined.score([make_sample(0)])
    assert result.error == f"prm: {error}"


async def test_a_part_judges_only_its_data_sources() -> None:
    math, code, everything = constant(1.0), constant(2.0), constant(10.0)
    combined = CombinedReward(
        "reward",
        [
            RewardPart("math", math, data_sources=frozenset({"math"})),
            RewardPart("code", code, data_sources=frozenset({"code"})),
            RewardPart("all", everything),
        ],
        30.0,
    )
    samples = [make_sample(0, "math"), make_sample(1, "code"), make_sample(2, "math")]
    results = await combined.score(samples)
    assert [result.value for result in results] == [11.0, 12.0, 11.0]
    assert math.seen == [["p0@1#0", "p2@1#0"]]
    assert code.seen == [["p1@1#0"]]


async def test_a_sample_that_no_part_judges_is_told_what_to_add() -> None:
    math = RewardPart("math", constant(1.0), data_sources=frozenset({"math"}))
    good, bad = await CombinedReward("reward", [math], 30.0).score([make_sample(0), make_sample(1, "poems")])
    assert good.value == 1.0
    assert bad.value is None
    assert bad.error == "no reward is meant for data_source 'poems': add a part for it under roles.reward.parts"


def raises(error: BaseException) -> Callable[[Sequence[Sample]], Any]:
    def judge(samples: Sequence[Sample]) -> Any:
        raise error

    return judge


def each(result: Any) -> Callable[[Sequence[Sample]], Any]:
    return lambda samples: [result for _ in samples]


BAD_REWARDS = {
    "raises": (raises(KeyError("answer")), "KeyError: 'answer'"),
    "exits": (raises(SystemExit(1)), "SystemExit: 1"),
    "its own timeout": (raises(TimeoutError("judge server")), "TimeoutError: judge server"),
    "cancels itself": (raises(asyncio.CancelledError()), "the reward cancelled itself"),
    "too few": (lambda samples: [], "returned 0 results for 1 samples"),
    "too many": (lambda samples: [RewardResult(1.0)] * (len(samples) + 1), "returned 2 results for 1 samples"),
    "none at all": (lambda samples: None, "returned a NoneType, not a list of RewardResult"),
    "plain numbers": (each(1.0), "returned a float (1.0), not a RewardResult"),
    "NaN": (each(RewardResult(float("nan"))), "the reward is nan, not a finite number"),
    "infinity": (each(RewardResult(float("inf"))), "the reward is inf, not a finite number"),
    "text": (each(RewardResult("good")), "the reward is 'good', not a finite number"),  # type: ignore[arg-type]  # wrong on purpose
    "NaN in a component": (each(RewardResult(1.0, {"style": float("nan")})), "component 'style' is nan"),
    "several numbers": (each(RewardResult(torch.ones(2))), "not a finite number"),  # type: ignore[arg-type]  # on purpose
    "components of the wrong type": (each(RewardResult(1.0, ["style"])), "components is a list"),  # type: ignore[arg-type]  # on purpose
    "words for token values": (each(RewardResult(1.0, {}, ["a", "b"])), "not an array of numbers"),  # type: ignore[arg-type]  # on purpose
    "NaN in a token value": (each(RewardResult(1.0, {}, np.array([0, np.nan], np.float32))), "not finite"),
    "too many token values": (each(RewardResult(1.0, {}, np.zeros(3, np.float32))), "shape (3,) for 2 completion"),
    "says so itself": (each(RewardResult(None, error="no answer found")), "no answer found"),
}


@pytest.mark.parametrize("name", BAD_REWARDS)
async def test_a_bad_reward_marks_its_samples_and_never_raises(name: str) -> None:
    judge, problem = BAD_REWARDS[name]
    parts = [RewardPart("bad", FakeReward(judge)), RewardPart("good", constant(1.0))]
    results = await CombinedReward("reward", parts, 30.0).score([make_sample(0), make_sample(1)])
    for result in results:
        assert result.value is None, "a sum with a part missing would be another reward"
        assert result.error is not None
        assert result.error.startswith("bad: ")
        assert problem in result.error


async def test_a_reward_that_hangs_is_given_up() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    combined = CombinedReward("judge", [RewardPart("slow", FakeReward(lambda samples: hang()))], 0.01)
    [result] = await combined.score([make_sample(0)])
    assert result.error == "slow: no answer within 0.01 s (roles.judge.timeout_s)"


async def hang_on_a_marked_one(samples: Sequence[Sample]) -> list[RewardResult]:
    if any(sample.prompt.id == "p1" for sample in samples):
        await asyncio.Event().wait()
    return [RewardResult(1.0) for _ in samples]


def raise_on_a_marked_one(samples: Sequence[Sample]) -> list[RewardResult]:
    if any(sample.prompt.id == "p1" for sample in samples):
        raise ValueError("no answer in p1")
    return [RewardResult(1.0) for _ in samples]


def leave_out_a_marked_one(samples: Sequence[Sample]) -> list[RewardResult]:
    return [RewardResult(1.0) for sample in samples if sample.prompt.id != "p1"]


CULPRITS = {
    "raises": (raise_on_a_marked_one, "part: ValueError: no answer in p1"),
    "miscounts": (leave_out_a_marked_one, "part: returned 0 results for 1 samples"),
    "hangs": (hang_on_a_marked_one, "part: no answer within 0.05 s (roles.reward.timeout_s)"),
}


@pytest.mark.parametrize("name", CULPRITS)
@pytest.mark.parametrize("calls", [[[0, 1, 2]], [[0], [1], [2]], [[0, 1], [2]], [[2], [1, 0]]], ids=str)
async def test_who_fails_does_not_depend_on_who_shares_the_call(name: str, calls: list[list[int]]) -> None:
    judge, problem = CULPRITS[name]
    combined = CombinedReward("reward", [RewardPart("part", FakeReward(judge))], 0.05)
    results = {}
    for numbers in calls:
        scored = await combined.score([make_sample(number) for number in numbers])
        results |= dict(zip(numbers, scored, strict=True))
    assert {number: result.value for number, result in results.items()} == {0: 1.0, 1: None, 2: 1.0}
    assert results[1].error == problem


async def test_a_reward_of_groups_is_asked_again_for_whole_groups() -> None:
    def judge(samples: Sequence[Sample]) -> list[RewardResult]:
        groups = [sample.group_id for sample in samples]
        assert all(groups.count(group) == 2 for group in groups), "half a group would be another reward"
        return [RewardResult(float(groups.count(group))) for group in groups if group != "p1@1"]

    reward = FakeReward(judge)
    samples = [make_sample(number) for number in (0, 1, 0, 1)]
    for index, sample in enumerate(samples):
        sample.id = f"{sample.group_id}#{index // 2}"
    combined = CombinedReward("reward", [RewardPart("part", reward, unit="group")], 30.0)
    results = await combined.score(samples)
    assert [result.value for result in results] == [2.0, None, 2.0, None]
    assert reward.seen[1:] == [["p0@1#0", "p0@1#1"], ["p1@1#0", "p1@1#1"]]


async def test_a_call_that_worked_is_not_repeated() -> None:
    reward = constant(1.0)
    await CombinedReward("reward", [RewardPart("part", reward)], 30.0).score([make_sample(0), make_sample(1)])
    assert len(reward.seen) == 1


async def test_stopping_the_run_is_not_taken_for_a_failure_of_the_reward() -> None:
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    combined = CombinedReward("reward", [RewardPart("slow", FakeReward(lambda samples: hang()))], 30.0)
    scoring = asyncio.ensure_future(combined.score([make_sample(0)]))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_only_the_samples_of_the_failing_part_are_marked() -> None:
    parts = [
        RewardPart("code", FakeReward(raises(OSError("no sandbox"))), data_sources=frozenset({"code"})),
        RewardPart("math", constant(1.0), data_sources=frozenset({"math"})),
    ]
    results = await CombinedReward("reward", parts, 30.0).score([make_sample(0, "code"), make_sample(1, "math")])
    assert results[0].error == "code: OSError: no sandbox"
    assert results[1].value == 1.0


async def test_offload_and_onload_reach_every_part() -> None:
    rewards = [constant(1.0), constant(2.0)]
    combined = CombinedReward("reward", [RewardPart(str(i), reward) for i, reward in enumerate(rewards)], 30.0)
    await combined.offload({"weights"})
    await combined.onload({"weights"})
    assert [reward.offloaded for reward in rewards] == [[("offload", {"weights"}), ("onload", {"weights"})]] * 2


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (RewardResult(1e308), "the reward is 1e+308; it must lie within ±1e+12"),
        (RewardResult(-1e13), "the reward is -1e+13; it must lie within ±1e+12"),
        (RewardResult(10**400), "the reward is 1000"),
        (RewardResult(1.0, {"length": 3e38}), "component 'length' is 3e+38; it must lie within ±1e+12"),
        (RewardResult(1.0, token_values=np.array([0, -2e30])), "token_values holds a number that is not within"),
    ],
)
async def test_a_finite_number_that_would_overflow_names_its_reward(result: RewardResult, error: str) -> None:
    judge = FakeReward(lambda samples: [result, *[RewardResult(1.0)] * (len(samples) - 1)])
    absurd, fine = await CombinedReward("reward", [RewardPart("length", judge)], 30.0).score(
        [make_sample(0), make_sample(1)]
    )
    assert absurd.error is not None
    assert absurd.error.startswith(f"length: {error}")
    assert fine.value == 1.0


async def test_a_weight_may_not_make_a_sum_overflow() -> None:
    parts = [RewardPart("a", constant(1e6), weight=1e9), RewardPart("b", constant(1.0))]
    [result] = await CombinedReward("reward", parts, 30.0).score([make_sample(0)])
    assert result.error == "the weighted sum is 1e+15; it must lie within ±1e+12"


async def test_objects_that_raise_when_looked_at_are_an_error() -> None:
    class RudeError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

        __float__ = __index__ = __str__  # type: ignore[assignment]

    def judge(samples: Sequence[Sample]) -> list[RewardResult]:
        raise RudeError

    for reward in (FakeReward(judge), FakeReward(lambda samples: [RewardResult(RudeError())])):
        [result] = await CombinedReward("reward", [RewardPart("own", reward)], 30.0).score([make_sample(0)])
        assert result.value is None
        assert result.error is not None
        assert "RudeError" in result.error or "RuntimeError" in result.error


async def test_a_reward_that_can_score_nothing_ends_the_run_and_is_not_asked_again() -> None:
    def refused(samples: Sequence[Sample]) -> Any:
        raise RoleLostError("the server refuses the key")

    reward = FakeReward(refused)
    group = CombinedReward("reward", [RewardPart("http", reward), RewardPart("other", constant(1.0))], 30.0)
    with pytest.raises(RoleLostError, match="the server refuses the key"):
        await group.score([make_sample(0), make_sample(1)])
    assert len(reward.seen) == 1
