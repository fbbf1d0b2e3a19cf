"""Evaluation: sample every held-out prompt, score it, average."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chatlearn_core.config.models import RunConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.environment import make_slots
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import Graph
from chatlearn_core.metrics import Timers
from chatlearn_core.types import UNGRADED, Example, Metric, Metrics, RewardResult, Sample, SamplingParams

ACCURACY = ("accuracy", "acc")
"""Components by which a reward says whether the sample is right, the first that it has."""


def evaluation_flow(generator: str, reward: str) -> Callable[[Any, Any], Any]:
    """A flow that generates with one role and scores with another; nothing is trained."""

    def evaluate(prompts: Any, m: Any) -> Any:
        samples = getattr(m, generator).generate(prompts)
        return m.join(samples, getattr(m, reward).score(samples))

    return evaluate


def evaluation_roles(config: RunConfig, graph: Graph) -> tuple[str, str]:
    """The generator and the reward that evaluation uses: those of the algorithm's flow; where it has none, the only
    configured ones.

    Raises:
        ConfigError: there is none, or more than one.
    """
    chosen: list[str] = []
    for kind, method in (("generator", "generate"), ("reward", "score")):
        called = [node.role for node in graph.calls(method)]
        roles = called or [name for name, role in config.roles.items() if role.kind == kind]
        if len(roles) != 1:
            found = f"there are {', '.join(roles)}" if roles else "there is none"
            raise ConfigError(
                f"data.eval needs a role of kind {kind}; the flow of algorithm {config.algorithm.name!r} calls none, "
                f"and of the configured ones {found}. Keep or add one (roles.{kind} with kind: {kind}), or remove "
                "data.eval"
            )
        chosen.append(roles[0])
    return chosen[0], chosen[1]


class Evaluator:
    """Evaluates the generator's current weights on fixed prompts.

    Args:
        scheduler: runs ``evaluation_flow``.
        examples: the evaluation prompts, all of them, every time.
        sampling: greedy by default; otherwise seeded by the prompt alone, so that evaluations compare.
        samples_per_prompt: completions for each prompt.
    """

    def __init__(
        self,
        scheduler: FlowScheduler,
        examples: Sequence[Example],
        sampling: SamplingParams,
        *,
        samples_per_prompt: int,
        seed: int,
    ) -> None:
        self.scheduler = scheduler
        self.examples = examples
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.seed = seed

    async def evaluate(self, timers: Timers) -> tuple[Metrics, list[Sample]]:
        """``eval/reward``, lengths, ``eval/accuracy`` where the rewards give it; by data source too where there are
        several.
        """
        slots = make_slots(self.examples, "eval", self.samples_per_prompt, self.sampling, self.seed)
        apart = Timers()
        with timers.measure("eval"):
            samples = await self.scheduler.run(slots, apart)
        timers.adopt(apart, during="eval")
        metrics = evaluation_metrics("eval", samples)
        sources = sorted({sample.prompt.data_source for sample in samples})
        if len(sources) > 1:
            for source in sources:
                of_source = [sample for sample in samples if sample.prompt.data_source == source]
                metrics |= evaluation_metrics(f"eval/{source}", of_source)
        return metrics, samples


def evaluation_metrics(prefix: str, samples: Sequence[Sample]) -> Metrics:
    """Averages over samples. One that could not be generated or scored counts as wrong, and is counted.

    A reward above 0 is not an answer that is right, so ``accuracy`` is there only if every reward says what is right.
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
    lengths = [sample.num_completion_tokens for sample in samples if sample.completion is not None]
    if lengths:
        metrics[f"{prefix}/response_length"] = Metric(sum(lengths), len(lengths))
    return metrics


def accuracy(reward: RewardResult) -> float | None:
    """How right the sample is, 0 to 1: the reward's component ``accuracy`` or ``acc``; None if it has none, or one that
    is no share.
    """
    value = next((reward.components[name] for name in ACCURACY if name in reward.components), None)
    return value if value is not None and 0.0 <= value <= 1.0 else None
