"""Evaluation: the same prompts and random numbers every time; what failed counts as wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.evaluator import (
    EvaluationRoles,
    Evaluator,
    accuracy,
    evaluation_flow,
    evaluation_metrics,
    evaluation_roles,
)
from chatlearn_core.flow import Graph, trace
from chatlearn_core.metrics import Timers
from chatlearn_core.types import (
    RAW_BASIS,
    UNGRADED,
    Completion,
    Metric,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
)

SAMPLING = SamplingParams(8, temperature=0.5)


def finished(sample_id: str, source: str, reward: RewardResult | None, length: int = 2) -> Sample:
    prompt = Prompt(sample_id, np.array([1]), "?", source)
    completion = Completion(sample_id, np.arange(length), np.zeros(length, np.float32), RAW_BASIS, "stop", SAMPLING, ())
    sample = sample_from_completion(sample_id, sample_id, prompt, completion)
    sample.reward = reward
    if reward is None or reward.error:
        sample.exclusion = "reward failed: x"
    return sample


class FakeScheduler:
    """Gives every request the next of some rewards."""

    graph = Graph("none", (), {})

    def __init__(self, rewards: list[RewardResult | None]) -> None:
        self.rewards = rewards
        self.runs: list[list[tuple[str, int]]] = []

    async def run(self, requests: Any, timers: Any) -> list[Sample]:
        self.runs.append([(request.sample_id, request.generate_request.sampling.seed) for request in requests])
        return [
            finished(request.sample_id, request.prompt.data_source, reward)
            for request, reward in zip(requests, self.rewards, strict=True)
        ]


def make_evaluator(rewards: list[RewardResult | None], sources: list[str], samples_per_prompt: int = 1) -> Any:
    prompts = [Prompt(f"p{i}", np.array([1]), "?", source) for i, source in enumerate(sources)]
    return Evaluator(
        FakeScheduler(rewards),  # type: ignore[arg-type]  # the part that is used
        prompts,
        SAMPLING,
        samples_per_prompt=samples_per_prompt,
        seed=3,
    )


def judged(value: float, accuracy: float) -> RewardResult:
    return RewardResult(value, {"accuracy": accuracy})


async def test_averages() -> None:
    rewards = [judged(1.0, 1.0), judged(0.5, 0.0), judged(0.0, 0.0), None]
    metrics, samples = await make_evaluator(rewards, ["math"] * 4).evaluate(Timers())
    assert {name: metric.value for name, metric in metrics.items()} == {
        "eval/accuracy": 0.25,
        "eval/samples": 4,
        "eval/failed": 1,
        "eval/reward": 0.5,
        "eval/response_length": 2,
    }
    assert len(samples) == 4


async def test_several_data_sources_are_told_apart() -> None:
    rewards: list[Any] = [judged(1.0, 1.0), judged(0.0, 0.0), judged(1.0, 1.0)]
    metrics, _ = await make_evaluator(rewards, ["math", "math", "code"]).evaluate(Timers())
    assert metrics["eval/accuracy"].value == pytest.approx(2 / 3)
    assert metrics["eval/math/accuracy"].value == 0.5
    assert metrics["eval/code/accuracy"].value == 1.0


async def test_a_source_whose_reward_says_what_is_right_has_an_accuracy_where_another_has_none() -> None:
    rewards: list[Any] = [judged(1.0, 1.0), RewardResult(0.9)]
    metrics, _ = await make_evaluator(rewards, ["math", "poems"]).evaluate(Timers())
    assert metrics["eval/math/accuracy"].value == 1.0
    assert not {"eval/accuracy", "eval/poems/accuracy"} & metrics.keys()
    assert metrics["eval/poems/reward"].value == 0.9


async def test_every_evaluation_asks_for_the_same_samples() -> None:
    evaluator = make_evaluator([RewardResult(1.0)] * 4, ["math"] * 2, samples_per_prompt=2)
    await evaluator.evaluate(Timers())
    await evaluator.evaluate(Timers())
    first, second = evaluator.scheduler.runs
    assert first == second
    assert [sample_id for sample_id, _ in first] == ["p0@eval#0", "p0@eval#1", "p1@eval#0", "p1@eval#1"]
    assert len({seed for _, seed in first}) == 4


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        ({"accuracy": 0.0}, 0.0),
        ({"accuracy": 1.0, "acc": 0.0}, 1.0),
        ({"acc": 1.0}, 1.0),
        ({"accuracy": 0.5}, 0.5),
        ({"format": 1.0}, None),
        ({}, None),
        ({"accuracy": 87.0}, None),  # no share
    ],
)
def test_accuracy_is_what_the_reward_says(components: dict[str, float], expected: float | None) -> None:
    assert accuracy(RewardResult(1.2, components)) == expected


def test_a_positive_reward_is_no_accuracy() -> None:
    """A reward for length or format is above 0 for almost anything, a random model's text included."""
    metrics = evaluation_metrics("eval", [finished(str(i), "s", RewardResult(0.01)) for i in range(3)])
    assert "eval/accuracy" not in metrics
    assert metrics["eval/reward"].value == pytest.approx(0.01)


def test_without_any_reward_there_is_no_average_of_rewards() -> None:
    assert "eval/reward" not in evaluation_metrics("eval", [finished("s", "math", None)])


def test_the_flow_generates_and_scores() -> None:
    graph = trace(
        evaluation_flow(EvaluationRoles("sampler", "generate", "judge")), {"sampler": "generator", "judge": "reward"}
    )
    assert [node.name for node in graph.nodes] == ["sampler.generate", "judge.score"]


ROLES = {"other": "generator", "sampler": "generator", "strict": "reward", "judge": "reward", "policy": "trainer"}


def roles_config(**roles: str) -> Any:
    return SimpleNamespace(
        algorithm=SimpleNamespace(name="acme"), roles={name: SimpleNamespace(kind=kind) for name, kind in roles.items()}
    )


def test_evaluation_uses_the_roles_of_the_algorithms_flow_whatever_they_are_called() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        samples = m.sampler.generate(prompts)
        return m.join(samples, m.judge.score(samples), m.policy.logprobs(samples))

    assert evaluation_roles(roles_config(**ROLES), trace(flow, ROLES)) == EvaluationRoles(
        "sampler", "generate", "judge"
    )


def test_a_flow_that_generates_nothing_is_evaluated_with_the_only_roles_there_are() -> None:
    graph = trace(lambda demonstrations, m: demonstrations, ROLES, given="demonstrations")
    only = roles_config(policy="trainer", sampler="generator", judge="reward")
    assert evaluation_roles(only, graph) == EvaluationRoles("sampler", "generate", "judge")
    with pytest.raises(ConfigError, match=r"data\.eval needs a role of kind generator.*there are other, sampler"):
        evaluation_roles(roles_config(**ROLES), graph)
    with pytest.raises(ConfigError, match=r"data\.eval needs a role of kind reward.*there is none.*roles.reward"):
        evaluation_roles(roles_config(policy="trainer", sampler="generator"), graph)


def test_samples_that_were_too_hard_to_judge_are_counted() -> None:
    rewards = [RewardResult(0.0, {"accuracy": 0.0, UNGRADED: 1.0}), RewardResult(1.0, {"accuracy": 1.0})]
    metrics = evaluation_metrics("eval", [finished(f"s{i}", "a", reward) for i, reward in enumerate(rewards)])
    assert metrics["eval/ungraded"].value == 1
    assert metrics["eval/accuracy"] == Metric(1.0, 2)
    rewards[0] = RewardResult(-1.0, {UNGRADED: 1.0})
    metrics = evaluation_metrics("eval", [finished(f"s{i}", "a", reward) for i, reward in enumerate(rewards)])
    assert metrics["eval/accuracy"] == Metric(1.0, 2), "its function never got to say what is right"
    assert "eval/ungraded" not in evaluation_metrics("eval", [finished("s", "a", rewards[1])])
