"""Draws training examples: mixed by ratio, shuffled by seed, resumable from a small state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.data.pipeline import Dataset
from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols.decisions import ExampleSampler, SamplerContext
from chatlearn_core.types import Example, ExampleDraw, Sample
from chatlearn_data.mixing import next_dataset, shares
from chatlearn_data.options import ShuffledOptions

_STATE_VERSION = 2


class ShuffledSampler(ExampleSampler):
    """An endless stream of examples over one or several datasets.

    Each dataset is drawn epoch by epoch, each epoch in a new order: draw k of epoch e of a dataset is a pure function
    of (seed, dataset name, e), so the state is the number of batches and one count per dataset. A dataset that ends
    restarts, reshuffled, independently of the others.

    Args:
        datasets: at least one, none empty.
        seed: determines the order.
        shuffle: False keeps the stored order in every epoch.
    """

    def __init__(self, datasets: Sequence[Dataset], *, seed: int, shuffle: bool = True) -> None:
        assert datasets, "a sampler needs at least one dataset"
        assert all(dataset.examples for dataset in datasets), "a sampler needs examples in every dataset"
        self._datasets = tuple(datasets)
        self._seed = seed
        self._shuffle = shuffle
        self._shares = shares([dataset.weight for dataset in datasets])
        self._drawn = [0] * len(datasets)
        self._batches = 0
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}
        self._identity = [
            {
                "name": dataset.name,
                "size": len(dataset.examples),
                "fingerprint": dataset.fingerprint,
                "weight": dataset.weight,
            }
            for dataset in datasets
        ]

    @property
    def epochs(self) -> dict[str, float]:
        """Dataset name -> number of passes made over it so far, fractional."""
        return {
            dataset.name: drawn / len(dataset.examples)
            for dataset, drawn in zip(self._datasets, self._drawn, strict=True)
        }

    def observe(self, samples: Sequence[Sample]) -> None:
        """Does nothing: draws do not depend on samples."""

    def next_batch(self, size: int) -> list[ExampleDraw]:
        """Draw ``size`` examples.

        Seed keys contain the number of the batch, from 1. If an example occurs again in the same batch (at the end of
        an epoch, or in a batch larger than the dataset), its id there is followed by ``~2``, ``~3``, ...
        """
        self._batches += 1
        batch: list[ExampleDraw] = []
        names: set[str] = set()
        for _ in range(size):
            example, number = self._draw()
            name, repeat = example.id, 2
            while name in names:
                name, repeat = f"{example.id}~{repeat}", repeat + 1
            names.add(name)
            batch.append(ExampleDraw(example, number, f"{name}@{self._batches}"))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain JSON values."""
        return {
            "version": _STATE_VERSION,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "batches": self._batches,
            "datasets": [
                {**identity, "drawn": drawn} for identity, drawn in zip(self._identity, self._drawn, strict=True)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``: the next batches are those that would have followed.

        Raises:
            CheckpointError: the state belongs to other data, another mixture or another order.
        """
        here = self.state_dict()
        try:
            saved = list(state["datasets"])
            pairs = [(key, state[key], here[key]) for key in ("version", "seed", "shuffle")]
            pairs.append(("number of datasets", len(saved), len(self._datasets)))
            for old, new in zip(saved, self._identity, strict=False):
                pairs.extend((f"{key} of dataset '{new['name']}'", old[key], new[key]) for key in new)
            drawn = [int(old["drawn"]) for old in saved]
            batches = int(state["batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"The sampler's state is damaged: {type(error).__name__}: {error}.") from error
        changed = [f"  {what}: {old!r} in the checkpoint, {new!r} now" for what, old, new in pairs if old != new]
        if changed:
            raise CheckpointError(
                "The data changed since the checkpoint was written, so the run cannot be continued as it was:\n"
                + "\n".join(changed)
                + "\n  Restore the data and settings of the checkpoint, or start a new run from its weights."
            )
        self._drawn, self._batches = drawn, batches

    def _draw(self) -> tuple[Example, int]:
        """An example and the number of its earlier draws: every epoch of its dataset draws it once."""
        index = next_dataset(self._shares, self._drawn)
        examples = self._datasets[index].examples
        epoch, position = divmod(self._drawn[index], len(examples))
        self._drawn[index] += 1
        return examples[int(self._order(index, epoch)[position])], epoch

    def _order(self, index: int, epoch: int) -> npt.NDArray[np.int64]:
        """Order of one epoch of one dataset; the latest one is cached."""
        if index not in self._orders or self._orders[index][0] != epoch:
            dataset = self._datasets[index]
            self._orders[index] = (epoch, self._computed_order(dataset.name, len(dataset.examples), epoch))
        return self._orders[index][1]

    def _computed_order(self, name: str, size: int, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        key = hashlib.sha256(f"{self._seed}/{name}/{epoch}".encode()).digest()[:16]
        # NumPy keeps the raw stream of a bit generator fixed between versions, but not the result of permutation().
        draws = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size)
        return np.argsort(draws, kind="stable").astype(np.int64)


def shuffled_sampler(options: ShuffledOptions, context: SamplerContext) -> ShuffledSampler:
    """The factory of the plugin ``shuffled``."""
    return ShuffledSampler(context.datasets, seed=context.seed, shuffle=context.shuffle)
