"""The step between rollouts and updates: an algorithm's advantages, computed in the worker that has the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from chatlearn_core.batching import SamplePacker
from chatlearn_core.exceptions import FlowError
from chatlearn_core.executor.decisions import Decisions
from chatlearn_core.protocols import Algorithm, DataStore, PlainData, TrainerGroup
from chatlearn_core.runtime.boundary import metric_problem
from chatlearn_core.types import Derived, Metric, Metrics, Sample, scored_batch
from chatlearn_core.types.array_ref import TensorRef

EMPTY = "empty_completion"
"""Exclusion of a sample without a token to train on."""


@dataclass(slots=True, frozen=True)
class AdvantageComputer:
    """Computes an algorithm's advantages for a step's samples in a worker of ``group``.

    Args:
        algorithm: computes the advantages.
        group: returns the trainer group of the policy, which has or can fetch the flow's results. Called every time,
            because a runtime may rebuild the group.
        decisions: exclude samples beforehand.
        data: fetches the values that these decisions read.
    """

    algorithm: Algorithm
    group: Callable[[], TrainerGroup]
    decisions: Decisions = field(default_factory=Decisions)
    data: DataStore = field(default_factory=PlainData)

    async def add(self, samples: Sequence[Sample], step: int, packer: SamplePacker | None = None) -> Metrics:
        """Write the algorithm's data into the samples, exclude those that the algorithm names or that have no token to
        train on, and return its metrics.

        Args:
            samples: samples of a step.
            packer: packs them; given if they are packed elsewhere, too.

        Raises:
            FlowError: the returned data do not fit the samples; names the data and the rule.
        """
        for sample in samples:
            if sample.exclusion is None and not sample.loss_mask.any():
                sample.exclusion = EMPTY
        if self.decisions.filters:
            self.decisions.exclude(samples, await self.data.aget(samples, self.decisions.reads))
        admitted = [sample for sample in samples if sample.exclusion is None]
        packer = packer or SamplePacker()
        batch = scored_batch(admitted, packer.pack(admitted))
        compute = partial(self.algorithm.advantages, step=step)
        derived = await self.group().derive(batch, compute, self.algorithm.advantage_split)
        if problem := _derived_problem(derived):
            raise FlowError(f"advantages of {type(self.algorithm).__name__} {problem}")
        by_id = {sample.id: sample for sample in admitted}
        for name, rows in derived.sequence_data.items():
            if rows.shape[:1] != (len(admitted),):
                raise _misfit(f"sequence_data[{name!r}]", rows, f"one row for each of {len(admitted)} samples")
            for sample, value in zip(admitted, rows.tolist(), strict=True):
                sample.sequence_data[name] = value
        for name, values in derived.token_data.items():
            if values.shape[:1] != (batch.num_tokens,):
                raise _misfit(f"token_data[{name!r}]", values, f"one row for each of {batch.num_tokens} tokens")
            for sample, array in zip(admitted, packer.unpack(values, batch, name), strict=True):
                sample.token_data[name] = array
        for sample_id, reason in derived.exclusions.items():
            if sample_id not in by_id:
                raise FlowError(
                    f"advantages of {type(self.algorithm).__name__} exclude sample {sample_id!r}, which is not in the "
                    f"batch they were computed of. Derived.exclusions is keyed by TrainBatch.sample_ids"
                )
            by_id[sample_id].exclusion = reason
        return derived.metrics


def _derived_problem(derived: Any) -> str | None:
    """What an algorithm returned instead of new data; None if it is that. Values are where the arrays are."""
    if not isinstance(derived, Derived):
        return f"returned a {type(derived).__name__}; they return Derived"
    for name, reason in derived.exclusions.items():
        if not isinstance(reason, str) or not reason:
            return f"exclude sample {name!r} for the reason {reason!r:.80}; a reason is text"
    for name, values in (*derived.token_data.items(), *derived.sequence_data.items()):
        if not isinstance(name, str) or not isinstance(values, Tensor | TensorRef):
            return f"returned {name!r:.80} as a {type(values).__name__}; data are tensors with names (Derived)"
        if isinstance(values, Tensor) and not torch.isfinite(values).all():
            return f"returned {name!r} with a value that is not finite"
    for name, metric in derived.metrics.items():
        if problem := metric_problem(name, metric) if isinstance(metric, Metric) else f"{name!r}, which is no Metric":
            return f"reported {problem}"
    return None


def _misfit(what: str, values: Tensor, rule: str) -> FlowError:
    return FlowError(
        f"an algorithm's advantages returned {what} of shape {list(values.shape)}; it has {rule} (Derived)"
    )
