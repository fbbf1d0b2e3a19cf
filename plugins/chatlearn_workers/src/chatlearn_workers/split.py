"""Splits a batch over the ranks of a trainer, and joins their answers. Pure functions, independent of Ray.

Ranks with the same data-parallel rank (a model-parallel group) get the same slice, and their answers count as one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar, cast

import torch
from torch import Tensor

from chatlearn_core.batching import balance
from chatlearn_core.exceptions import BackendError
from chatlearn_core.plugins.records import OutputSpec
from chatlearn_core.types import Metrics, Outputs, TrainBatch, merge_metrics
from chatlearn_core.types.array_ref import Array, TensorRef, cut

K = TypeVar("K", bound=str)
T = TypeVar("T")


def assign(batch: TrainBatch, num_slices: int) -> list[list[int]]:
    """Sequence indices of each data-parallel slice: balanced by tokens, in whole units; some may be empty.

    A single slice is the batch itself, in its order.
    """
    if num_slices == 1:
        return [list(range(batch.num_sequences))]
    return balance(batch.lengths, batch.unit_index.tolist(), num_slices)


def take(batch: TrainBatch, assignment: Sequence[Sequence[int]]) -> list[TrainBatch]:
    """The slices; a slice with everything in order is the batch itself."""
    everything = list(range(batch.num_sequences))
    return [batch if list(indices) == everything else batch.select(indices) for indices in assignment]


def answers_of_slices(answers: Sequence[Mapping[K, T]], data_parallel_ranks: Sequence[int]) -> list[Mapping[K, T]]:
    """Merge the answers of each data-parallel rank's ranks: each name is taken from the first rank that reports it.

    All ranks of a model-parallel group may know a result, or only some: the last pipeline stage knows the loss, and the
    first may report a result of its own. A name that several ranks report is a single result; adding the reports would
    count samples twice.

    Args:
        answers: one per rank; empty if a rank has nothing to report.
        data_parallel_ranks: slice that each rank took.
    """
    slices: list[dict[K, T]] = [{} for _ in range(max(data_parallel_ranks) + 1)]
    for answer, slice_index in zip(answers, data_parallel_ranks, strict=True):
        for name, value in answer.items():
            slices[slice_index].setdefault(name, value)
    return list(slices)


def gather_metrics(answers: Sequence[Metrics], data_parallel_ranks: Sequence[int]) -> Metrics:
    """Metric parts of all slices, merged by name; within a slice each name counts once."""
    return merge_metrics(*(dict(part) for part in answers_of_slices(answers, data_parallel_ranks)))


def sequence_outputs(specs: Mapping[str, OutputSpec]) -> frozenset[str]:
    """Names of the outputs with one row per sequence."""
    return frozenset(name for name, spec in specs.items() if spec.per == "sequence")


def gather_outputs(
    batch: TrainBatch,
    assignment: Sequence[Sequence[int]],
    answers: Sequence[Outputs],
    data_parallel_ranks: Sequence[int],
    per_sequence: Collection[str],
) -> Outputs:
    """Outputs of the slices in the order of the batch: [T, ...] per token, [S, ...] for those ``per_sequence``.

    References stay references.

    Raises:
        BackendError: a slice with sequences has no answer, or an answer of the wrong length.
    """
    slices = answers_of_slices(answers, data_parallel_ranks)
    bounds = batch.cu_seqlens.tolist()
    gathered: Outputs = {}
    stored: dict[str, dict[int, Array]] = {}
    for index, (indices, part) in enumerate(zip(assignment, slices, strict=True)):
        if not indices:
            continue
        if not part:
            raise BackendError(
                f"no rank of data-parallel slice {index} returned outputs for its {len(indices)} sequences"
            )
        for name, values in part.items():
            rows = indices if name in per_sequence else _token_rows(bounds, indices)
            if len(values) != len(rows):
                raise BackendError(
                    f"data-parallel slice {index} returned {len(values)} rows of {name!r} for {len(indices)} sequences "
                    f"of {sum(bounds[i + 1] - bounds[i] for i in indices)} tokens; {len(rows)} were expected"
                )
            if isinstance(values, TensorRef):
                stored.setdefault(name, {}).update(_cut(values, bounds, indices))
                continue
            size = batch.num_sequences if name in per_sequence else batch.num_tokens
            if name not in gathered:
                gathered[name] = values.new_empty((size, *values.shape[1:]))
            gathered[name][torch.as_tensor(rows, dtype=torch.int64)] = values
    for name, arrays in stored.items():
        gathered[name] = cast(Tensor, TensorRef([arrays[index] for index in range(batch.num_sequences)]))
    if not gathered:  # an empty batch: all outputs are empty
        return dict(next((part for part in slices if part), {}))
    return gathered


def _cut(values: TensorRef, bounds: Sequence[int], indices: Sequence[int]) -> dict[int, Array]:
    """Split a slice's tensor, which is one stored array, by sequence of the batch."""
    [whole] = values.sequences
    lengths = [bounds[i + 1] - bounds[i] for i in indices]
    ends = list(accumulate(lengths))
    return {i: cut(whole, end - length, end) for i, length, end in zip(indices, lengths, ends, strict=True)}


def _token_rows(bounds: Sequence[int], indices: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in indices])
