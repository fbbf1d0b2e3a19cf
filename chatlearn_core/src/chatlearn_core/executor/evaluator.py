"""Evaluation: samples every held-out prompt, scores and measures the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from chatlearn_core.batching.balance import units_in_order
from chatlearn_core.config.models import RunConfig
from chatlearn_core.data import ExampleKind
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.evaluation_metrics import Measures, evaluation_metrics, with_intervals
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import Graph
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, TrainerGroup
from chatlearn_core.types import (
    Derived,
    Example,
    Metric,
    Metrics,
    Sample,
    SamplingParams,
    TrainBatch,
    evaluation_draw,
    scored_batch,
)


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


def evaluation_roles(config: RunConfig, graph: Graph, reward: str | None = None) -> EvaluationRoles:
    """The generator (or environment) and the reward for evaluation: those of the algorithm's flow or, if it has none,
    the only configured ones.

    Args:
        reward: an evaluation set's own reward role.

    Raises:
        ConfigError: there is no such role, or more than one.
    """
    environments = graph.calls("environment.rollout")
    rewards = graph.calls("reward.score")
    if len(environments) == 1 and len({node.role for node in rewards}) <= 1:
        return EvaluationRoles(environments[0].role, "rollout", reward or (rewards[0].role if rewards else None))
    return EvaluationRoles(
        _only_role(config, graph, "generator", "generator.generate"),
        "generate",
        reward or _only_role(config, graph, "reward", "reward.score"),
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

    async def of(self, prefix: str, samples: Sequence[Sample], measures: Measures) -> Metrics:
        """``{prefix}/samples`` and the results of ``Algorithm.evaluation_metrics``, with ``prefix`` before each name;
        with intervals, as far as a metric is a mean over prompts.
        """
        learned = [sample for sample in samples if sample.exclusion is None and sample.loss_mask.any()]
        metrics: Metrics = {
            f"{prefix}/samples": Metric(len(samples), reducer="sum"),
            f"{prefix}/failed": Metric(len(samples) - len(learned), reducer="sum"),
        }
        if not learned:
            return metrics
        batch = scored_batch(learned)
        found = (await self.group().derive(batch, partial(own_metrics, self.algorithm))).metrics
        if measures.resamples:
            metrics |= with_intervals(prefix, await self._by_prompt(batch, found), measures)
        return metrics | {f"{prefix}/{name}": metric for name, metric in found.items()}

    async def _by_prompt(self, batch: TrainBatch, metrics: Metrics) -> dict[str, list[tuple[float, float]]]:
        """Metric -> (sum, number of summands) of each prompt, of those metrics that are the means of what
        ``Algorithm.evaluation_metrics`` says of each prompt alone. One that compares prompts with each other, such as
        KTO's loss with its reference point, is not.
        """
        names = [name for name, metric in metrics.items() if metric.reducer == "mean"]
        parts = (await self.group().derive(batch, partial(metrics_of_groups, self.algorithm, names))).sequence_data
        firsts = [indices[0] for indices in units_in_order(batch.group_index.tolist())]
        found = {}
        for number, name in enumerate(names):
            totals, counts = parts[f"{number}/total"][firsts], parts[f"{number}/count"][firsts]
            count = float(counts.sum())
            if count and math.isclose(float(totals.sum()) / count, metrics[name].value, rel_tol=1e-5, abs_tol=1e-7):
                found[name] = list(zip(totals.tolist(), counts.tolist(), strict=True))
        return found


def own_metrics(algorithm: Algorithm, batch: TrainBatch) -> Derived:
    """The algorithm's metrics of one part of a batch."""
    return Derived(metrics=algorithm.evaluation_metrics(batch))


def metrics_of_groups(algorithm: Algorithm, names: Sequence[str], batch: TrainBatch) -> Derived:
    """The algorithm's metrics of each group alone, in order of ``names``: sequence data ``<number>/total`` and
    ``<number>/count``, [S] float64, at the first sequence of a group and 0 at the others.
    """
    totals, counts = torch.zeros(2, len(names), batch.num_sequences, dtype=torch.float64)
    for indices in units_in_order(batch.group_index.tolist()):
        metrics = algorithm.evaluation_metrics(batch.select(indices))
        for number, name in enumerate(names):
            if name in metrics:
                totals[number, indices[0]], counts[number, indices[0]] = metrics[name].total, metrics[name].count
    data = {f"{number}/total": totals[number] for number in range(len(names))}
    return Derived(sequence_data=data | {f"{number}/count": counts[number] for number in range(len(names))})


class Evaluator:
    """Evaluates the generator's current weights on one evaluation set.

    Args:
        scheduler: runs ``evaluation_flow``.
        examples: all evaluation prompts; the same every time.
        sampling: greedy by default; otherwise seeded by the prompt alone, so that evaluations are comparable.
        samples_per_prompt: number of completions per prompt.
        own_metrics: computes the metrics in place of ``evaluation_metrics``.
        kind: kind of the examples; prompts by default.
        name: name of the set, empty for datasets that no set names.
        measures: what is measured besides means.
        dataset_of: example id -> name of its dataset.
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
        name: str = "",
        measures: Measures | None = None,
        dataset_of: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.measures = measures or Measures()
        self.dataset_of = dataset_of
        self.kind = kind
        self.own_metrics = own_metrics
        self.scheduler = scheduler
        self.examples = examples
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed

    async def evaluate(self, timers: Timers) -> tuple[Metrics, list[Sample]]:
        """Return the samples and ``eval/reward``, lengths, ``eval/accuracy`` if the rewards provide it, and the rest of
        ``evaluation_metrics``; also per data source and per dataset if there are several. A named set has
        ``eval/<name>`` in place of ``eval``.
        """
        calls = self.scheduler.graph.calls("generator.generate")
        draws = [evaluation_draw(example, self.name) for example in self.examples]
        requests = make_requests(draws, self.samples_per_prompt, self.sampling, self.seed, calls, self.kind)
        apart = Timers()
        with timers.measure("eval"):
            samples = await self.scheduler.run(requests, apart)
        timers.adopt(apart, during="eval")
        prefix = f"eval/{self.name}" if self.name else "eval"
        metrics: Metrics = {}
        for part, of_part in self._parts(samples).items():
            metrics |= await self._measured(f"{prefix}/{part}" if part else prefix, of_part)
        return metrics, samples

    def _parts(self, samples: list[Sample]) -> dict[str, list[Sample]]:
        """All samples under the empty name; if there are several, those of each data source, and those of each dataset
        under ``dataset/<name>`` unless they are the data source of that name.
        """
        sources: dict[str, list[Sample]] = {}
        datasets: dict[str, list[Sample]] = {}
        for sample in samples:
            sources.setdefault(sample.prompt.data_source, []).append(sample)
            if sample.example_id in self.dataset_of:
                datasets.setdefault(self.dataset_of[sample.example_id], []).append(sample)
        parts = {"": samples}
        if len(sources) > 1:
            parts |= dict(sorted(sources.items()))
        if len(datasets) > 1:
            parts |= {f"dataset/{name}": one for name, one in datasets.items() if sources.get(name) != one}
        return parts

    async def _measured(self, prefix: str, samples: Sequence[Sample]) -> Metrics:
        if self.own_metrics is None:
            return evaluation_metrics(prefix, samples, self.measures)
        return await self.own_metrics.of(prefix, samples, self.measures)


@dataclass(slots=True, frozen=True)
class Evaluators:
    """The evaluators of all sets, which evaluate one after another."""

    of_sets: Sequence[Evaluator]

    async def evaluate(self, timers: Timers) -> tuple[Metrics, list[Sample]]:
        """The metrics and samples of all sets."""
        metrics: Metrics = {}
        samples: list[Sample] = []
        for evaluator in self.of_sets:
            of_set, sampled = await evaluator.evaluate(timers)
            metrics |= of_set
            samples += sampled
        return metrics, samples
