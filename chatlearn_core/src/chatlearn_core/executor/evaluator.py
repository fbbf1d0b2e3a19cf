"""Evaluation: samples every held-out prompt, scores the samples, averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from chatlearn_core.config.models import RunConfig
from chatlearn_core.data import ExampleKind
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import Graph
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, TrainerGroup
from chatlearn_core.types import (
    UNGRADED,
    Derived,
    Example,
    Metric,
    Metrics,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    evaluation_draw,
    scored_batch,
)

ACCURACY = ("accuracy", "acc")
"""Reward components that say whether a sample is right; the first one present counts."""


@dataclass(slots=True, frozen=True)
class EvaluationRoles:
    """The roles that evaluate prompts."""

    maker: str
    method: str
    """Method of ``maker``: ``generate`` of a generator, or ``rollout`` of an environment."""
    reward: str | None
    """None: the environment returns rewards with its rollouts."""


def evaluation_flow(roles: EvaluationRoles) -> Callable[[Any, Any], Any]:
    """A flow that samples with one role and scores with another, without training."""

    def evaluate(prompts: Any, m: Any) -> Any:
        samples = getattr(getattr(m, roles.maker), roles.method)(prompts)
        if roles.reward is None:
            return samples
        return m.join(samples, getattr(m, roles.reward).score(samples))

    return evaluate


def evaluation_roles(config: RunConfig, graph: Graph) -> EvaluationRoles:
    """The generator (or environment) and the reward for evaluation: those of the algorithm's flow or, if it has none,
    the only configured ones.

    Raises:
        ConfigError: there is no such role, or more than one.
    """
    environments = graph.calls("environment.rollout")
    rewards = graph.calls("reward.score")
    if len(environments) == 1 and len({node.role for node in rewards}) <= 1:
        return EvaluationRoles(environments[0].role, "rollout", rewards[0].role if rewards else None)
    return EvaluationRoles(
        _only_role(config, graph, "generator", "generator.generate"),
        "generate",
        _only_role(config, graph, "reward", "reward.score"),
    )


def _only_role(config: RunConfig, graph: Graph, kind: str, method: str) -> str:
    called = list(dict.fromkeys(node.role for node in graph.calls(method)))
    roles = called or [name for name, role in config.roles.items() if role.kind == kind]
    if len(roles) != 1:
        found = f"there are {', '.join(roles)}" if roles else "there is none"
        raise ConfigError(
            f"data.eval needs a role of kind {kind}; the flow of algorithm {config.algorithm.name!r} calls none, "
            f"and of the configured ones {found}. Keep or add one (roles.{kind} with kind: {kind}), or remove "
            "data.eval"
        )
    return roles[0]


@dataclass(slots=True, frozen=True)
class OwnMetrics:
    """An algorithm's own metrics of held-out samples, computed in a worker of ``group``."""

    algorithm: Algorithm
    group: Callable[[], TrainerGroup]

    async def of(self, prefix: str, samples: Sequence[Sample]) -> Metrics:
        """``{prefix}/samples`` and the results of ``Algorithm.evaluation_metrics``, with ``prefix`` before each
        name."""
        learned = [sample for sample in samples if sample.exclusion is None and sample.loss_mask.any()]
        metrics: Metrics = {
            f"{prefix}/samples": Metric(len(samples), reducer="sum"),
            f"{prefix}/failed": Metric(len(samples) - len(learned), reducer="sum"),
        }
        if learned:
            derived = await self.group().derive(scored_batch(learned), partial(own_metrics, self.algorithm))
            metrics |= {f"{prefix}/{name}": metric for name, metric in derived.metrics.items()}
        return metrics


def own_metrics(algorithm: Algorithm, batch: TrainBatch) -> Derived:
    """The algorithm's metrics of one part of a batch."""
    return Derived(metrics=algorithm.evaluation_metrics(batch))


class Evaluator:
    """Evaluates the generator's current weights on fixed prompts.

    Args:
        scheduler: runs ``evaluation_flow``.
        examples: all evaluation prompts; the same every time.
        sampling: greedy by default; otherwise seeded by the prompt alone, so that evaluations are comparable.
        samples_per_prompt: number of completions per prompt.
        own_metrics: computes the metrics in place of ``evaluation_metrics``.
        kind: kind of the examples; prompts by default.
    """

    def __init__(
        self,
        scheduler: FlowScheduler,
        examples: Sequence[Example],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int,
        seed: int,
        own_metrics: OwnMetrics | None = None,
        kind: ExampleKind | None = None,
    ) -> None:
        self.kind = kind
        self.own_metrics = own_metrics
        self.scheduler = scheduler
        self.examples = examples
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed

    async def evaluate(self, timers: Timers) -> tuple[Metrics, list[Sample]]:
        """Return the samples and ``eval/reward``, lengths, and ``eval/accuracy`` if the rewards provide it; with
        several data sources, also per source.
        """
        calls = self.scheduler.graph.calls("generator.generate")
        draws = [evaluation_draw(example) for example in self.examples]
        requests = make_requests(draws, self.samples_per_prompt, self.sampling, self.seed, calls, self.kind)
        apart = Timers()
        with timers.measure("eval"):
            samples = await self.scheduler.run(requests, apart)
        timers.adopt(apart, during="eval")
        metrics = await self._measured("eval", samples)
        sources = sorted({sample.prompt.data_source for sample in samples})
        if len(sources) > 1:
            for source in sources:
                of_source = [sample for sample in samples if sample.prompt.data_source == source]
                metrics |= await self._measured(f"eval/{source}", of_source)
        return metrics, samples

    async def _measured(self, prefix: str, samples: Sequence[Sample]) -> Metrics:
        if self.own_metrics is None:
            return evaluation_metrics(prefix, samples)
        return await self.own_metrics.of(prefix, samples)


def evaluation_metrics(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Averages over samples. A sample that could not be generated or scored counts as wrong, and is counted.

    A reward above 0 does not mean a right answer, so ``accuracy`` exists only if every reward provides it.
    """
    failed = sum(sample.exclusion is not None for sample in samples)
    values = [sample.reward.value for sample in samples if sample.reward and sample.reward.value is not None]
    metrics: Metrics = {
        f"{prefix}/samples": Metric(len(samples), reducer="sum"),
        f"{prefix}/failed": Metric(failed, reducer="sum"),
    }
    if ungraded := sum(s.reward is not None and UNGRADED in s.reward.components for s in samples):
        metrics[f"{prefix}/ungraded"] = Metric(ungraded, reducer="sum")
    judged = [s.reward for s in samples if s.reward and s.reward.value is not None]
    verdicts = [v for r in judged if (v := accuracy(r)) is not None or UNGRADED not in r.components]
    right = [verdict for verdict in verdicts if verdict is not None]
    if right and len(right) == len(verdicts):
        metrics[f"{prefix}/accuracy"] = Metric(sum(right), len(samples))
    if values:
        metrics[f"{prefix}/reward"] = Metric(sum(values), len(values))
    lengths = [sample.num_completion_tokens for sample in samples if sample.turns]
    if lengths:
        metrics[f"{prefix}/response_length"] = Metric(sum(lengths), len(lengths))
    return metrics


def accuracy(reward: RewardResult) -> float | None:
    """Accuracy of the sample, 0 to 1: the reward's component ``accuracy`` or ``acc``; None if it has none, or one
    outside [0, 1].
    """
    value = next((reward.components[name] for name in ACCURACY if name in reward.components), None)
    return value if value is not None and 0.0 <= value <= 1.0 else None
