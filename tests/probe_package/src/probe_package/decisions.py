"""Decisions in a run: which samples are drawn and excluded, what is scheduled, and when the run ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_core.protocols import Decision, ExampleSampler, SampleFilter, SamplerContext, Schedule, StepPolicy
from chatlearn_core.types import ExampleDraw, Sample
from probe_package.options import HalvingOptions, NoOptions, ThinnedOptions, TokenBudgetOptions


class Weakest(ExampleSampler):
    """Draws first what was never drawn, in the order of the data; then what had the lowest mean reward."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self.examples = {example.id: example for dataset in context.datasets for example in dataset.examples}
        self.names = {example.id: dataset.name for dataset in context.datasets for example in dataset.examples}
        self.draws = dict.fromkeys(self.examples, 0)
        self.rewards: dict[str, float] = {}

    @property
    def epochs(self) -> Mapping[str, float]:
        names = list(self.names.values())
        drawn = {name: sum(self.draws[id_] for id_, own in self.names.items() if own == name) for name in names}
        return {name: count / names.count(name) for name, count in drawn.items()}

    def next_batch(self, size: int) -> list[ExampleDraw]:
        order = list(self.examples)
        unseen = float("-inf")
        weakest = sorted(order, key=lambda id_: (self.rewards.get(id_, unseen), self.draws[id_], order.index(id_)))
        batch = []
        for index in range(size):
            id_ = weakest[index % len(weakest)]
            batch.append(ExampleDraw(self.examples[id_], self.draws[id_], f"{id_}@{self.draws[id_]}"))
            self.draws[id_] += 1
        return batch

    def observe(self, samples: Sequence[Sample]) -> None:
        values: dict[str, list[float]] = {}
        for sample in samples:
            if sample.reward is not None and sample.reward.value is not None:
                values.setdefault(sample.example_id, []).append(sample.reward.value)
        self.rewards |= {id_: sum(found) / len(found) for id_, found in values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws, "rewards": self.rewards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws, self.rewards = dict(state["draws"]), dict(state["rewards"])


class Thinned(SampleFilter):
    """Counts over the whole run, so its count is state."""

    def __init__(self, options: ThinnedOptions) -> None:
        self.every = options.every
        self.seen = 0

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        numbers = range(self.seen + 1, self.seen + len(samples) + 1)
        self.seen += len(samples)
        return {
            sample.id: "thinned" for number, sample in zip(numbers, samples, strict=True) if not number % self.every
        }

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Halving(Schedule):
    """start, start / 2, start / 4, ..."""

    def __init__(self, options: HalvingOptions) -> None:
        self.options = options

    def value(self, step: int) -> float:
        return self.options.start * 0.5 ** ((step - 1) // self.options.every)


class TokenBudget(StepPolicy):
    """Counts trained tokens, also over a resume."""

    def __init__(self, options: TokenBudgetOptions) -> None:
        self.tokens = options.tokens
        self.used = 0.0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision:
        self.used += metrics["perf/trained_tokens"]
        spent = self.used >= self.tokens
        return Decision(
            stop=f"{self.used:g} of {self.tokens} tokens are used" if spent else None,
            metrics={"budget/used": self.used},
        )

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["used"]
