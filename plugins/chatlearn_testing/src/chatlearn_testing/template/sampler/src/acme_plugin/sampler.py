"""The sampler ``acme``."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols import SamplerContext
from chatlearn_core.types import Example, ExampleDraw, Sample

from acme_plugin.options import AcmeOptions


class AcmeSampler:
    """Draws each dataset pass by pass, in a new order each time, without the prompts that rest.

    Implements ``chatlearn_core.protocols.ExampleSampler``. A prompt rests if every sample of its group got the reward
    ``solved_at``: a policy learns nothing from such a group. If all prompts of a dataset rest, none does.
    """

    def __init__(self, options: AcmeOptions, context: SamplerContext) -> None:
        self.options = options
        self._datasets = context.datasets
        self._seed, self._shuffle = context.seed, context.shuffle
        self._data = [[dataset.name, len(dataset.examples), dataset.fingerprint] for dataset in context.datasets]
        self._dataset_of = {e.id: i for i, dataset in enumerate(context.datasets) for e in dataset.examples}
        self._passes = [0] * len(context.datasets)
        self._queues: list[deque[int]] = [deque() for _ in context.datasets]
        self._drawn = [0] * len(context.datasets)
        self._draws: Counter[str] = Counter()
        self._rests: dict[str, int] = {}

    @property
    def epochs(self) -> dict[str, float]:
        """Dataset name -> draws of its examples, divided by their number."""
        return {
            dataset.name: drawn / len(dataset.examples)
            for dataset, drawn in zip(self._datasets, self._drawn, strict=True)
        }

    def next_batch(self, size: int) -> list[ExampleDraw]:
        """Draw from the dataset that is furthest behind its share, ``size`` times."""
        batch = []
        for _ in range(size):
            shares = [drawn / dataset.weight for dataset, drawn in zip(self._datasets, self._drawn, strict=True)]
            index = shares.index(min(shares))
            example = self._next_example(index)
            number = self._draws[example.id]
            self._draws[example.id] += 1
            self._drawn[index] += 1
            batch.append(ExampleDraw(example, number, f"{example.id}@{number}"))
        return batch

    def observe(self, samples: Sequence[Sample]) -> None:
        """Let the solved prompts rest."""
        groups: dict[str, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group_id, []).append(sample)
        for group in groups.values():
            name = group[0].example_id
            rewards = [None if sample.reward is None else sample.reward.value for sample in group]
            if all(reward is not None and reward >= self.options.solved_at for reward in rewards):
                self._rests[name] = self._passes[self._dataset_of[name]] + self.options.rest_passes

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on, as JSON values."""
        return {
            "data": [list(one) for one in self._data],
            "passes": list(self._passes),
            "queues": [list(queue) for queue in self._queues],
            "drawn": list(self._drawn),
            "draws": dict(self._draws),
            "rests": dict(self._rests),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            CheckpointError: the state belongs to other data, or is damaged.
        """
        try:
            data, passes = [list(one) for one in state["data"]], [int(number) for number in state["passes"]]
            queues = [deque(int(index) for index in queue) for queue in state["queues"]]
            drawn = [int(number) for number in state["drawn"]]
            draws = Counter({str(name): int(number) for name, number in state["draws"].items()})
            rests = {str(name): int(number) for name, number in state["rests"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"is damaged: {type(error).__name__}: {error}"
            raise CheckpointError(f"The state of sampler 'acme' {problem}.") from error
        if data != self._data or not len(passes) == len(queues) == len(drawn) == len(data):
            raise CheckpointError(
                f"Sampler 'acme' cannot continue with other data: the checkpoint has {data}, the run has {self._data} "
                "(name, number of examples, fingerprint). Restore the data, or start a new run from the weights."
            )
        self._passes, self._queues, self._rests = passes, queues, rests
        self._drawn, self._draws = drawn, draws

    def _next_example(self, index: int) -> Example:
        examples, queue = self._datasets[index].examples, self._queues[index]
        if not queue:
            awake = [i for i, e in enumerate(examples) if self._rests.get(e.id, 0) <= self._passes[index]]
            queue.extend(self._order(index, awake or list(range(len(examples)))))
            self._passes[index] += 1
        return examples[queue.popleft()]

    def _order(self, index: int, numbers: list[int]) -> list[int]:
        """The order of a pass: a function of the seed, the dataset's name and the number of the pass."""
        if not self._shuffle:
            return numbers
        key = f"{self._seed}/{self._datasets[index].name}/{self._passes[index]}"
        generator = np.random.Generator(np.random.Philox(key=int(hashlib.sha256(key.encode()).hexdigest()[:32], 16)))
        return [numbers[i] for i in generator.permutation(len(numbers))]
