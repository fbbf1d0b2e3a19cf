"""Decisions of plugins: what they may decide, what is refused, and that their state comes through a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import CheckpointError, ConfigError, PluginError, PluginNotFoundError
from chatlearn_core.executor.decisions import Decisions, build_decisions, build_sampler, next_draws, option_schedules
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Decision, SampleFilter, StepPolicy
from chatlearn_core.types import ExampleDraw, Prompt, RewardResult, Sample, SamplingParams

SAMPLING = SamplingParams(max_tokens=100)
PROMPT = Prompt("p", np.arange(1), "?")
PLACE = "train.step_policies.0 (acme)"


def sample(name: str) -> Sample:
    ids = np.arange(3)
    return Sample(name, "g", Prompt("p", ids[:1], "?"), ids, ids > 0, num_prompt_tokens=1)


class Even(SampleFilter):
    """Leaves out every second sample that it ever saw."""

    def __init__(self, reason: str = "odd") -> None:
        self.seen = 0
        self.reason = reason

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        numbered = enumerate(samples, start=self.seen)
        self.seen += len(samples)
        return {one.id: self.reason for number, one in numbered if number % 2}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Doubles(SampleFilter):
    """Doubles the rewards, or gives those that a test wants."""

    def __init__(self, rewards: Mapping[str, RewardResult] | None = None) -> None:
        self.wanted = rewards

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        return {}

    def rewards(self, samples: Sequence[Sample]) -> Mapping[str, RewardResult]:
        if self.wanted is not None:
            return self.wanted
        return {one.id: RewardResult(2 * (one.reward.value or 0.0)) for one in samples if one.reward is not None}


class Says(StepPolicy):
    """Decides the same after every step."""

    def __init__(self, decision: Decision | None) -> None:
        self.decision = decision

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        return self.decision


def after(*decisions: Decision | None) -> Decision:
    policies = {f"train.step_policies.{i} (acme)": Says(decision) for i, decision in enumerate(decisions)}
    return Decisions(step_policies=policies).after_step(3, {"reward": 0.5}, SAMPLING)


def test_filters_see_what_is_left_in_their_order() -> None:
    samples = [sample(name) for name in "abcde"]
    samples[0].exclusion = "failed"
    Decisions({"rollout.filters.0 (even)": Even(), "rollout.filters.1 (even)": Even("second")}).exclude(samples)
    assert [one.exclusion for one in samples] == ["failed", None, "odd", "second", "odd"]


@pytest.mark.parametrize("excluded", [{"z": "odd"}, {"a": ""}])
def test_a_filter_names_samples_that_it_was_given_with_a_reason(excluded: dict[str, str]) -> None:
    strange: Any = SimpleNamespace(excluded=lambda samples: excluded)
    with pytest.raises(PluginError, match=r"rollout\.filters\.0 \(acme\) excludes sample"):
        Decisions({"rollout.filters.0 (acme)": strange}).exclude([sample("a")])


def test_what_a_plugin_raises_names_it() -> None:
    broken: Any = SimpleNamespace(after_step=lambda step, metrics: metrics["no such"])
    with pytest.raises(PluginError, match=r"train\.step_policies\.0 \(acme\) raised KeyError: 'no such'"):
        Decisions(step_policies={PLACE: broken}).after_step(1, {}, SAMPLING)


def test_policies_decide_together() -> None:
    assert after(None, None) == Decision(None, {}, {})
    decision = after(Decision(stop="enough", metrics={"budget": 1}), Decision(stop="too long"))
    assert decision.stop == "enough (train.step_policies.0 (acme)); too long (train.step_policies.1 (acme))"
    assert decision.metrics == {"budget": 1.0}


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(sampling={"temperature": 0.5}), "sets sampling.temperature; only max_tokens may change"),
        (Decision(sampling={"max_tokens": 101}), "to 101; it must be from 1 to 100"),
        (Decision(sampling={"max_tokens": 0}), "to 0; it must be from 1 to 100"),
        (Decision(metrics={"reward": 1.0}), "adds the metric 'reward', which step 3 has already"),
        (Decision(metrics={"note": "good"}), "with the value 'good', not a finite number"),  # type: ignore[dict-item]
        (Decision(metrics={"note": float("nan")}), "with the value nan, not a finite number"),
        (Decision(metrics=None), "returned a Decision whose metrics is None; it is a mapping"),  # type: ignore[arg-type]
        (Decision(sampling={3: 1}), "returned a Decision whose sampling is {3: 1}"),  # type: ignore[dict-item]
        (Decision(stop=True), "stops the run for the reason True, which is no text"),  # type: ignore[arg-type]
        ({"stop": "enough"}, "returned a dict; after_step returns a Decision or None"),
    ],
)
def test_what_may_not_be_decided(decision: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        after(decision)


@pytest.mark.parametrize("drawn", [None, [], ["p1", "p2"], [ExampleDraw(PROMPT, 0, "a")], (x for x in ())])
def test_a_sampler_returns_as_many_draws_as_were_asked_for(drawn: Any) -> None:
    sampler: Any = SimpleNamespace(next_batch=lambda size: drawn)
    with pytest.raises(PluginError, match=r"SimpleNamespace: next_batch\(2\) returned .*a list of 2 ExampleDraw"):
        next_draws(sampler, 2)


def test_a_shorter_length_holds_from_the_next_step_on_and_the_schedule_bounds_it() -> None:
    line: Any = SimpleNamespace(value=lambda step: 10.0 * step)
    decisions = Decisions(step_policies={PLACE: Says(Decision(sampling={"max_tokens": 35}))}, max_tokens=("s", line))
    assert [decisions.sampling_at(step, SAMPLING).max_tokens for step in (1, 5, 10)] == [10, 50, 100]
    decisions.after_step(1, {}, SAMPLING)
    assert [decisions.sampling_at(step, SAMPLING).max_tokens for step in (1, 5, 10)] == [10, 35, 35]
    with pytest.raises(PluginError, match=r"s sets sampling\.max_tokens to 110"):
        decisions.sampling_at(11, SAMPLING)


def test_state_comes_through_json() -> None:
    def make() -> Decisions:
        return Decisions({"rollout.filters.0 (even)": Even()}, {PLACE: Says(Decision(sampling={"max_tokens": 7}))})

    first, second = make(), make()
    first.exclude([sample("a")])
    first.after_step(1, {}, SAMPLING)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in (first, second):
        left = [sample("b"), sample("c")]
        one.exclude(left)
        assert [x.exclusion for x in left] == ["odd", None], "the second sample overall is the first one here"
        assert one.sampling_at(2, SAMPLING).max_tokens == 7
    with pytest.raises(CheckpointError, match=r"holds the state of rollout.*this run has nothing"):
        Decisions().load_state_dict(first.state_dict())
    strange: Any = SimpleNamespace(state_dict=lambda: {"array": np.zeros(1)})
    with pytest.raises(PluginError, match=r"0 \(acme\): its state_dict\(\) cannot be stored as JSON"):
        Decisions(step_policies={PLACE: strange}).state_dict()


def loaded(*schedules: str) -> Any:
    config = SimpleNamespace(
        schedules=[SimpleNamespace(setting=setting) for setting in schedules],
        seed=1,
        data=RunConfig.model_fields["data"].annotation.model_construct(shuffle=False),  # type: ignore[union-attr]
    )
    choice = SimpleNamespace(record=SimpleNamespace(name="acme"), options=None)
    return SimpleNamespace(
        config=config,
        chosen=lambda *path: choice if path[0] == "schedules" and path[1] < len(schedules) else None,
    )


REGISTRY: Any = SimpleNamespace(load_factory=lambda record: lambda options: SimpleNamespace(value=lambda step: step))


def test_schedules_are_of_what_can_change() -> None:
    both = loaded("sampling.max_tokens", "algorithm.options.kl_coef")
    assert build_decisions(both, REGISTRY).max_tokens is not None
    assert list(option_schedules(both, REGISTRY)) == ["kl_coef"]
    with pytest.raises(ConfigError, match=r"schedules\.0 \(acme\) schedules 'sampling.temperature'; what can change"):
        build_decisions(loaded("sampling.temperature"), REGISTRY)
    with pytest.raises(ConfigError, match=r"schedules\.1 \(acme\) and schedules\.0 \(acme\) both schedule"):
        build_decisions(loaded("sampling.max_tokens", "sampling.max_tokens"), REGISTRY)


def test_without_a_choice_the_sampler_is_the_shuffled_one() -> None:
    dataset: Any = SimpleNamespace(
        name="d", weight=1.0, fingerprint="f", examples=[Prompt(name, np.arange(2), name) for name in "abc"]
    )
    sampler = build_sampler(loaded(), discover_plugins(), [dataset])
    assert [draw.example.id for draw in sampler.next_batch(4)] == ["a", "b", "c", "a"], "data.shuffle is false"
    with pytest.raises(PluginNotFoundError, match=r"(?s)sampler.*'shuffled'.*data\.sampler"):
        build_sampler(loaded(), PluginRegistry(), [dataset])


def test_filters_may_change_rewards_one_after_the_other() -> None:
    samples = [sample("a"), sample("b"), sample("c")]
    for number, one in enumerate(samples):
        one.reward = RewardResult(float(number))
    Decisions({"first": Doubles(), "second": Even(), "third": Doubles()}).exclude(samples)
    assert [one.reward and one.reward.value for one in samples] == [0.0, 2.0, 8.0], "b is excluded before the third"
    assert [one.exclusion for one in samples] == [None, "odd", None]


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ({"z": RewardResult(1.0)}, "first gives sample 'z' a reward; it was not given such a sample"),
        ({"a": RewardResult(float("nan"))}, "first gives sample 'a' a reward that cannot be used: the reward is nan"),
        ({"a": 1.0}, "first gives sample 'a' a reward that cannot be used: returned a float"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused(rewards: Any, problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        Decisions({"first": Doubles(rewards)}).exclude([sample("a")])
