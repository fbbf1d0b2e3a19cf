"""Sequences packed end to end: the input of trainers and losses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types.array_ref import Array, ArrayRef, TensorRef
from chatlearn_core.types.sample import Sample


@dataclass(slots=True, eq=False)
class TrainBatch:
    """S sequences packed end to end, T tokens in all, in the order of ``sample_ids``.

    A unit is a set of sequences with the same ``unit_index``; it is never split over micro-batches or ranks.
    ``token_data["loss_weight"]`` holds weights that already include the global denominator. An empty batch (S = 0)
    is legal and has no weight.

    In the driver of a run with several processes, per-token tensors may be ``TensorRef``, which have shapes but no
    values; in the worker that computes on the batch they are plain tensors.

    Example: sequences [7, 8, 9] and [4, 2] give ``token_ids = [7, 8, 9, 4, 2]`` and ``cu_seqlens = [0, 3, 5]``.
    """

    sample_ids: tuple[str, ...]
    token_ids: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[S + 1] int32 on the host; sequence s is [cu_seqlens[s], cu_seqlens[s + 1])."""
    loss_mask: Tensor
    """[T] bool; True where the token is trained on. Never True at a sequence's first token."""
    unit_index: Tensor
    """[S] int64, host"""
    group_index: Tensor
    """[S] int64, host; sequences sampled from the same draw of an example share a value."""
    token_data: dict[str, Tensor] = field(default_factory=dict)
    """name -> [T, ...]"""
    sequence_data: dict[str, Tensor] = field(default_factory=dict)
    """name -> [S, ...]"""
    num_prompt_tokens: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """[S] int64, host; position at which the first turn of each sequence begins. By default 0."""
    example_ids: tuple[str, ...] = ()
    """S ids of the examples behind the sequences: the same in every epoch. By default ``sample_ids``."""

    def __post_init__(self) -> None:
        if len(self.num_prompt_tokens) != self.num_sequences:
            self.num_prompt_tokens = torch.zeros(self.num_sequences, dtype=torch.int64)
        self.example_ids = self.example_ids or self.sample_ids

    @property
    def num_sequences(self) -> int:
        return len(self.sample_ids)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def lengths(self) -> list[int]:
        """S sequence lengths, tokens."""
        return [int(n) for n in self.cu_seqlens.diff().tolist()]

    @property
    def position_ids(self) -> Tensor:
        """[T] int64, restarting at 0 with every sequence."""
        if not self.num_sequences:
            return torch.zeros(0, dtype=torch.int64)
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.token_ids.device)

    @property
    def sequence_index(self) -> Tensor:
        """[T] int64: index of the sequence that each token belongs to."""
        index = torch.repeat_interleave(torch.arange(self.num_sequences), self.cu_seqlens.diff().long())
        return index.to(self.token_ids.device)

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """A new batch of the sequences at ``indices``, in that order."""
        bounds = self.cu_seqlens.tolist()
        spans = [(bounds[i], bounds[i + 1]) for i in indices]

        def tokens(values: Tensor) -> Tensor:
            if isinstance(values, TensorRef):
                return values.select_sequences(indices)
            return torch.cat([values[a:b] for a, b in spans]) if spans else values[:0]

        rows = torch.as_tensor(list(indices), dtype=torch.int64)
        return TrainBatch(
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            token_ids=tokens(self.token_ids),
            cu_seqlens=cumulative_lengths([b - a for a, b in spans]),
            loss_mask=tokens(self.loss_mask),
            unit_index=self.unit_index[rows],
            group_index=self.group_index[rows],
            num_prompt_tokens=self.num_prompt_tokens[rows],
            example_ids=tuple(self.example_ids[i] for i in indices),
            token_data={name: tokens(values) for name, values in self.token_data.items()},
            sequence_data={name: values[rows.to(values.device)] for name, values in self.sequence_data.items()},
        )

    def to(self, device: torch.device | str) -> TrainBatch:
        """A copy whose per-token and per-sequence tensors are on ``device``; the index tensors stay on the host."""
        return TrainBatch(
            self.sample_ids,
            self.token_ids.to(device),
            self.cu_seqlens,
            self.loss_mask.to(device),
            self.unit_index,
            self.group_index,
            {name: values.to(device) for name, values in self.token_data.items()},
            {name: values.to(device) for name, values in self.sequence_data.items()},
            self.num_prompt_tokens,
            self.example_ids,
        )


def cumulative_lengths(lengths: Sequence[int]) -> Tensor:
    """[S + 1] int32: 0 and the running sum of ``lengths``."""
    return torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def end_to_end(arrays: Sequence[Array]) -> Tensor:
    """[T, ...] the rows of one or more arrays, one array after another; a ``TensorRef`` if any of them is a reference,
    otherwise a copy.
    """
    if any(isinstance(array, ArrayRef) for array in arrays):
        return cast(Tensor, TensorRef(arrays))
    return torch.from_numpy(np.concatenate(arrays))


def pack_samples(
    samples: Sequence[Sample],
    units: Sequence[Hashable] | None = None,
    *,
    join: Callable[[Sequence[Array]], Tensor] = end_to_end,
) -> TrainBatch:
    """Pack samples end to end.

    All samples must carry the same ``token_data`` and ``sequence_data``. References are not fetched: they become a
    ``TensorRef``.

    Args:
        samples: in the order the batch is to have.
        units: one name or number per sample; samples with the same unit are never split. By default each sample's
            ``unit_id``.
        join: joins the arrays of one field, given one array per sample.

    Raises:
        BackendError: a sample lacks data that another has, or its array has a different length than its tokens, or
            rows of a different shape or type than another sample's; names both.
    """
    token_names = _names_of_all(samples, "token_data")
    sequence_names = _names_of_all(samples, "sequence_data")
    for sample in samples:
        for name, values in sample.token_data.items():
            problem = _shape_problem(values, sample, samples[0].token_data[name])
            if problem is not None:
                raise BackendError(
                    f"sample {sample.id!r}: token_data {name!r} has {problem}; per-token data has one entry for each "
                    "token of prompt and completion, of one shape and type in all samples"
                )

    def joined(arrays: list[Array], dtype: torch.dtype) -> Tensor:
        return join(arrays) if arrays else torch.zeros(0, dtype=dtype)

    return TrainBatch(
        sample_ids=tuple(sample.id for sample in samples),
        token_ids=joined([s.token_ids for s in samples], torch.int64),
        cu_seqlens=cumulative_lengths([len(s.token_ids) for s in samples]),
        loss_mask=joined([s.loss_mask for s in samples], torch.bool),
        unit_index=_numbered([s.unit_id for s in samples] if units is None else units),
        group_index=_numbered([s.group_id for s in samples]),
        num_prompt_tokens=torch.as_tensor([s.num_prompt_tokens for s in samples], dtype=torch.int64),
        example_ids=tuple(s.example_id for s in samples),
        token_data={name: joined([s.token_data[name] for s in samples], torch.float32) for name in sorted(token_names)},
        sequence_data={name: torch.tensor([s.sequence_data[name] for s in samples]) for name in sorted(sequence_names)},
    )


def _numbered(names: Sequence[Hashable]) -> Tensor:
    """[S] int64: each name's number, counted by first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.as_tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64)


def _shape_problem(values: np.ndarray, sample: Sample, first: np.ndarray) -> str | None:
    if len(values) != len(sample.token_ids):
        return f"{len(values)} entries for {len(sample.token_ids)} tokens"
    if values.shape[1:] != first.shape[1:] or values.dtype != first.dtype:
        rows, expected = (f"{array.dtype} rows of shape {array.shape[1:]}" for array in (values, first))
        return f"{rows}, and that of the first sample {expected}"
    return None


def _names_of_all(samples: Sequence[Sample], kind: Literal["token_data", "sequence_data"]) -> list[str]:
    """Names of the data that every sample has. Raises if only some samples have a name: its data would be lost."""
    found: list[set[str]] = [set(getattr(sample, kind)) for sample in samples]
    everywhere = set.intersection(*found) if found else set()
    for name in sorted(set().union(*found) - everywhere):
        having = [sample.id for sample, names in zip(samples, found, strict=True) if name in names]
        lacking = next(sample.id for sample, names in zip(samples, found, strict=True) if name not in names)
        raise BackendError(
            f"sample {lacking!r} has no {kind} {name!r}, but sample {having[0]!r} has ({len(having)} of {len(samples)} "
            "samples of this batch do): data that a loss or trainer may read must be present in every sample. Write it "
            "for every sample (in the generator or the algorithm's advantages), or exclude the samples without it"
        )
    return sorted(everywhere)
