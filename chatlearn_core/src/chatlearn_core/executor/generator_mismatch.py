"""The difference between the generator's logprobs of its samples and those that the policy's trainer computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.batching import SamplePacker
from chatlearn_core.executor.rollouts.staleness import fresh_mask
from chatlearn_core.executor.truncated_sampling import TRUNCATED_LOGPROBS
from chatlearn_core.flow import Graph, Node
from chatlearn_core.metrics.mismatch import mismatch_metrics
from chatlearn_core.protocols import TrainerGroup
from chatlearn_core.types import (
    RAW_BASIS,
    Derived,
    Floats,
    LogprobBasis,
    Metrics,
    Sample,
    SamplingParams,
    TrainBatch,
)

STALE_MASK = "stale_mask"
"""[T] bool: tokens that older weights sampled; they differ by what the updates since then have changed."""


@dataclass(slots=True, frozen=True)
class GeneratorMismatch:
    """Compares the logprobs, in a worker of the role that computed the trainer's.

    Args:
        node: the flow's call that computes the policy's logprobs.
        sampling: the run's sampling parameters.
        group: returns the trainer group; called every time, because a runtime may rebuild it.
    """

    node: Node
    sampling: SamplingParams
    group: Callable[[], TrainerGroup]

    async def metrics(
        self, samples: Sequence[Sample], policy_version: int, packer: SamplePacker | None = None
    ) -> Metrics:
        """``mismatch/...``; empty if no sample has both logprobs.

        Args:
            samples: samples of a step, with the policy's logprobs.
            policy_version: version of the weights that computed these.
            packer: packs the samples; given if they are packed elsewhere, too.
        """
        temperature = self.node.arguments.get("temperature", self.sampling.temperature) or 1.0
        fields = self.node.output_fields
        if TRUNCATED_LOGPROBS in fields:
            basis, field = replace(self.sampling.basis, temperature=temperature), fields[TRUNCATED_LOGPROBS]
        else:
            basis, field = LogprobBasis(temperature), fields["logprobs"]
        both = both_logprobs(samples, basis, field, policy_version)
        batch = (packer or SamplePacker()).pack(both)
        if not batch.num_sequences:
            return {}
        return (await self.group().derive(batch, compare_logprobs)).metrics


def policy_logprobs(graph: Graph, policy: str | None) -> Node | None:
    """The call that computes the policy's logprobs of the samples; None if the flow has none."""
    names = {"logprobs", TRUNCATED_LOGPROBS}
    return next((node for node in graph.nodes if node.role == policy and names & node.output_fields.keys()), None)


def both_logprobs(samples: Sequence[Sample], basis: LogprobBasis, trained: str, policy_version: int) -> list[Sample]:
    """The samples whose generator logprobs have the trainer's ``basis``, with both in ``token_data`` as
    ``trainer_logprobs`` and ``generator_logprobs``.

    Tokens sampled by weights other than those
    of ``policy_version`` are masked out, because their logprobs rightly differ; if there are any, ``stale_mask`` in
    ``token_data`` has them.
    """
    both: list[Sample] = []
    whole: list[npt.NDArray[np.bool_]] = []
    for sample in samples:
        logprobs = _generator_logprobs(sample, basis)
        if logprobs is not None and trained in sample.token_data:
            arrays: dict[str, Any] = {"trainer_logprobs": sample.token_data[trained], "generator_logprobs": logprobs}
            mask = fresh_mask(sample, policy_version)
            whole.append(sample.loss_mask)
            both.append(replace(sample, loss_mask=mask, token_data=arrays, sequence_data={}))
    if any(sample.loss_mask is not mask for sample, mask in zip(both, whole, strict=True)):
        for sample, mask in zip(both, whole, strict=True):
            sample.token_data[STALE_MASK] = mask & ~sample.loss_mask
    return both


def compare_logprobs(batch: TrainBatch) -> Derived:
    """Differences of the generator's and the trainer's logprobs in a batch of samples from ``both_logprobs``."""
    data = batch.token_data
    metrics = mismatch_metrics(data["trainer_logprobs"], data["generator_logprobs"], batch.loss_mask)
    if STALE_MASK in data:
        stale = mismatch_metrics(data["trainer_logprobs"], data["generator_logprobs"], data[STALE_MASK])
        metrics |= {f"mismatch/stale_{name.removeprefix('mismatch/')}": metric for name, metric in stale.items()}
    return Derived(metrics=metrics)


def _generator_logprobs(sample: Sample, basis: LogprobBasis) -> Floats | None:
    """[T] the generator's logprobs of that basis, 0 where it sampled nothing; None if it returned none."""
    if not sample.turns:
        return None
    data = sample.token_data
    if all(turn.basis == basis for turn in sample.turns):
        return data.get("generator_logprobs", data.get("generator_raw_logprobs"))
    return data.get("generator_raw_logprobs") if basis == RAW_BASIS else None
