"""Evaluation: the same prompts and random numbers every time; what failed counts as wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.evaluation_metrics import Measures, accuracy, evaluation_metrics, usual_k
from chatlearn_core.executor.evaluator import (
    EvaluationRoles,
    Evaluator,
    OwnMetrics,
    evaluation_flow,
    evaluation_roles,
)
from chatlearn_core.executor.repeated_sampling import bootstrap_intervals
from chatlearn_core.flow import Graph, trace
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm
from chatlearn_core.types import (
    RAW_BASIS,
    UNGRADED,
    Completion,
    Derived,
    Metric,
    Metrics,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    sample_from_completion,
)
from chatlearn_core.types.keyed_seed import keyed_seed

SAMPLING = SamplingParams(8, temperature=0.5)


def finished(
    sample_id: str, source: str, reward: RewardResult | None, length: int = 2, group_id: str = "", example_id: str = ""
) -> Sample:
    prompt = Prompt(sample_id, np.array([1]), "?", source)
    completion = Completion(sample_id, np.arange(length), np.zeros(length, np.float32), RAW_BASIS, "stop", SAMPLING, ())
    sample = sample_from_completion(sample_id, group_id or sample_id, prompt, completion, example_id=example_id)
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
            finished(
                request.sample_id,
                request.prompt.data_source,
                reward,
                group_id=request.group_id,
                example_id=request.prompt.id,
            )
            for request, reward in zip(requests, self.rewards, strict=True)
        ]


def make_evaluator(
    rewards: list[RewardResult | None], sources: list[str], samples_per_prompt: int = 1, **settings: Any
) -> Any:
    prompts = [Prompt(f"p{i}", np.array([1]), "?", source) for i, source in enumerate(sources)]
    return Evaluator(
        FakeScheduler(rewards),  # type: ignore[arg-type]  # the part that is used
        prompts,
        SAMPLING,
        samples_per_prompt=samples_per_prompt,
        seed=3,
        **settings,
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


def graded(answer: str | None, right: bool, value: float | None = None) -> RewardResult:
    return RewardResult(float(right) if value is None else value, {"accuracy": float(right)}, answer=answer)


MEASURES = Measures(k=(1, 2, 4), resamples=200, seed=3)


async def test_several_samples_give_estimates_that_are_means_over_prompts() -> None:
    """Prompt 0: 3, 3, 5, 7 with 3 right. Prompt 1: 8, -, 9, failed with none right."""
    rewards = [graded("3", True), graded("3", True), graded("5", False), graded("7", False)]
    rewards += [graded("8", False), graded(None, False), graded("9", False), None]  # type: ignore[list-item]
    evaluator = make_evaluator(rewards, ["math"] * 2, 4, measures=MEASURES)
    metrics, _ = await evaluator.evaluate(Timers())
    found = {name.removeprefix("eval/"): metric.value for name, metric in metrics.items()}
    assert found["accuracy"] == found["avg@4"] == found["pass@1"] == 0.25
    assert found["maj@1"] == pytest.approx(0.25)
    assert found["pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # of 6 pairs one has no right sample
    assert found["maj@2"] == pytest.approx((1 + 4 * 0.5) / 6 / 2)  # one pair of 3s; four pairs tie 3 with another
    assert (found["pass@4"], found["maj@4"]) == (0.5, 0.5)
    assert found["best@2"] == pytest.approx((1 - 1 / 6) / 2)  # the failed sample has no reward
    assert found["best@4"] == 1.0  # prompt 1 has three rewards only
    assert found["pass@2/low"] == 0.0
    assert found["pass@2/high"] == pytest.approx(5 / 6)
    assert "best@4/low" not in found  # one prompt has no spread


async def test_without_answers_there_is_no_majority_and_without_a_threshold_nothing_passes() -> None:
    rewards: list[Any] = [RewardResult(value) for value in (0.2, 0.9, 0.4, 0.4)]
    plain, _ = await make_evaluator(rewards, ["poems"] * 2, 2, measures=Measures(k=(2,))).evaluate(Timers())
    assert {"eval/best@2", "eval/reward"} <= plain.keys()
    assert not {"eval/pass@2", "eval/maj@2", "eval/accuracy"} & plain.keys()
    measures = Measures(k=(1, 2), pass_threshold=0.4)
    passing, _ = await make_evaluator(rewards, ["poems"] * 2, 2, measures=measures).evaluate(Timers())
    assert passing["eval/pass@1"].value == 0.75
    assert passing["eval/pass@2"].value == 1.0
    assert "eval/accuracy" not in passing


def test_a_partly_right_sample_passes_by_the_threshold_alone() -> None:
    samples = [finished("a", "s", judged(0.5, 0.5)), finished("b", "s", judged(1.0, 1.0))]
    by_default = evaluation_metrics("eval", samples, Measures(k=(1,)))
    assert (by_default["eval/pass@1"].value, by_default["eval/accuracy"].value) == (0.5, 0.75)
    assert evaluation_metrics("eval", samples, Measures(k=(1,), pass_threshold=0.5))["eval/pass@1"].value == 1.0


async def test_a_named_set_has_names_and_samples_of_its_own() -> None:
    rewards: list[Any] = [judged(1.0, 1.0), judged(0.0, 0.0), judged(0.0, 0.0)]
    datasets = {"p0": "easy", "p1": "hard", "p2": "hard"}
    evaluator = make_evaluator(rewards, ["math", "math", "code"], name="mixed", dataset_of=datasets)
    metrics, samples = await evaluator.evaluate(Timers())
    accuracies = {name: metric.value for name, metric in metrics.items() if name.endswith("/accuracy")}
    assert accuracies == {
        "eval/mixed/accuracy": pytest.approx(1 / 3),
        "eval/mixed/math/accuracy": 0.5,
        "eval/mixed/code/accuracy": 0.0,
        "eval/mixed/dataset/easy/accuracy": 1.0,
        "eval/mixed/dataset/hard/accuracy": 0.0,
    }
    assert [sample.id for sample in samples] == ["p0@eval:mixed#0", "p1@eval:mixed#0", "p2@eval:mixed#0"]


async def test_a_dataset_that_is_one_data_source_is_measured_once() -> None:
    rewards: list[Any] = [judged(1.0, 1.0), judged(0.0, 0.0)]
    evaluator = make_evaluator(rewards, ["math", "code"], dataset_of={"p0": "math", "p1": "code"})
    metrics, _ = await evaluator.evaluate(Timers())
    assert not [name for name in metrics if "dataset" in name]


def test_usual_k() -> None:
    assert [usual_k(n) for n in (1, 2, 8, 10)] == [(), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8, 10)]


def test_an_evaluation_set_has_a_reward_of_its_own() -> None:
    config: Any = SimpleNamespace(roles={}, algorithm=SimpleNamespace(name="grpo"))
    flow = evaluation_flow(EvaluationRoles("sampler", "generate", "judge"))
    graph = trace(flow, {"sampler": "generator", "judge": "reward"})
    assert evaluation_roles(config, graph, "strict").reward == "strict"
    assert evaluation_roles(config, graph).reward == "judge"


class OwnLosses(Algorithm):
    """``mean_id``: the mean of completion ids, over tokens; ``spread`` compares prompts; ``most`` is no mean."""

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        ids = batch.token_ids[batch.loss_mask].double()
        spread = float((ids - ids.mean()).abs().sum())
        return {
            "mean_id": Metric(float(ids.sum()), len(ids)),
            "spread": Metric(spread, len(ids)),
            "most": Metric(float(ids.max()), reducer="max"),
        }


class InProcess:
    """A trainer group that computes here."""

    async def derive(self, batch: TrainBatch, function: Any) -> Derived:
        derived: Derived = function(batch)
        return derived


async def test_an_algorithms_own_means_over_prompts_have_intervals() -> None:
    """Prompt 0 has two samples of 2 tokens, the others one of 3 and 5: ids 0, 1, .. of each completion."""
    lengths = {"a": ("g0", 2), "b": ("g0", 2), "c": ("g1", 3), "d": ("g2", 5)}
    samples = [finished(name, "s", RewardResult(0.0), length, group_id) for name, (group_id, length) in lengths.items()]
    own = OwnMetrics(OwnLosses(), InProcess)  # type: ignore[arg-type, abstract]  # the parts that are used
    measures = Measures(resamples=500, seed=3)
    metrics = await own.of("eval", samples, measures)
    assert metrics["eval/mean_id"].value == pytest.approx((2 + 3 + 10) / 12)
    assert metrics["eval/most"].value == 4
    [expected] = bootstrap_intervals(
        np.array([[2.0], [3.0], [10.0]]),
        np.array([[4.0], [3.0], [5.0]]),
        resamples=500,
        confidence=measures.confidence,
        seed=keyed_seed(3, "evaluation intervals", "eval"),
    )
    assert (metrics["eval/mean_id/low"].value, metrics["eval/mean_id/high"].value) == expected
    assert expected is not None
    assert expected[0] < expected[1]
    assert not {"eval/spread/low", "eval/most/low"} & metrics.keys()
    assert "eval/mean_id/low" not in await own.of("eval", samples, Measures(resamples=0))
