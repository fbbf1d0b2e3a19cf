"""Splits a rank's batch into micro-batches, shares prompts inside each, and restores the order of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from chatlearn_core.batching import micro_batches
from chatlearn_core.batching.balance import units_in_order
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_trainer_kit.padded_micro_batch import padded_micro_batches, padded_tokens
from chatlearn_trainer_kit.shared_prompts import SharedPrompts, find_shared_prompts

REPEATED_TOKEN_SHARE = 8
"""A token that takes its row from another sequence counts as an eighth of a computed one. Attention still holds its
query, key, value and output, about an eighth of what a decoder layer keeps for the backward pass (with fewer key and
value heads than query heads, and an MLP of three to four times the width). If it counted as nothing, a long prompt with
many short completions would exceed the memory that the budget represents."""


class MicroBatches:
    """The micro-batches of a batch, as lists of sequence indices: at least one, and the same number on every rank.

    Iterating yields the lists, such as ``[0, 3]``, ``[1, 2]``; ``on`` yields the batches.

    Args:
        batch: on the host.
        max_tokens: token budget of one micro-batch.
        share_prompts: whether to compute equal beginnings of a group's prompts once in each micro-batch.
        padded: whether sequences are padded to the longest of their micro-batch, which counts in the budget.
        agree: reduces this rank's number of micro-batches to the largest of all ranks.
    """

    def __init__(
        self,
        batch: TrainBatch,
        max_tokens: int,
        *,
        share_prompts: bool,
        padded: bool = False,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        assert not (padded and share_prompts), "a sequence in its own row cannot share rows"
        self.batch = batch
        self.padded = padded
        self.shared = find_shared_prompts(batch) if share_prompts else None
        units, sizes = batch.unit_index.tolist(), batch.lengths
        if self.shared is not None:
            units, sizes = join_units(self.shared, sizes, units, batch.group_index.tolist(), max_tokens)
        into_cuts = padded_micro_batches if padded else micro_batches
        self.cuts = into_cuts(sizes, units, max_tokens, at_least=1)
        agreed = agree(len(self.cuts)) if agree is not None else len(self.cuts)
        if agreed > len(self.cuts):
            self.cuts = into_cuts(sizes, units, max_tokens, at_least=agreed)

    def __len__(self) -> int:
        return len(self.cuts)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.cuts)

    @property
    def num_filled(self) -> int:
        """Number of nonempty micro-batches."""
        return sum(1 for cut in self.cuts if cut)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens that pass through the trunk, including padding."""
        if self.padded:
            return sum(padded_tokens(self.batch.lengths, cut) for cut in self.cuts)
        return self.batch.num_tokens if self.shared is None else sum(self.shared.num_rows(cut) for cut in self.cuts)

    def on(self, device: torch.device) -> Iterator[tuple[TrainBatch, Tensor | None]]:
        """Yield each micro-batch, moved to the device only then.

        Yields:
            the batch, and [T] int64 the computed row of each of its tokens; None if each token has its own row.
        """
        for cut in self.cuts:
            is_whole = len(self.cuts) == 1 and cut == list(range(self.batch.num_sequences))
            micro = self.batch if is_whole else self.batch.select(cut)
            rows = self.shared.rows(cut) if self.shared is not None else None
            yield micro.to(device), rows

    def in_batch_order(self, pieces: Sequence[Outputs]) -> Outputs:
        """Join the micro-batches' outputs in the order of the batch."""
        order = [index for cut in self.cuts for index in cut]
        if len(pieces) == 1 and order == list(range(self.batch.num_sequences)):
            return pieces[0]
        bounds = self.batch.cu_seqlens.tolist()
        tokens = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order]) if order else torch.zeros(0).long()
        restored: Outputs = {}
        for name in pieces[0]:
            values = torch.cat([piece[name] for piece in pieces])
            places = tokens if len(values) == len(tokens) else torch.as_tensor(order)
            restored[name] = torch.empty_like(values).index_copy_(0, places, values)
        return restored


def join_units(
    shared: SharedPrompts,
    lengths: Sequence[int],
    unit_index: Sequence[int],
    group_index: Sequence[int],
    max_tokens: int,
) -> tuple[list[int], list[int]]:
    """Join units of one group, as far as they fit into one micro-batch, so that their shared tokens are computed once.

    Args:
        shared: shared prompts of the batch.
        lengths: number of tokens of each sequence.
        unit_index: the loss's unit of each sequence. Units are joined, never split; one that spans groups stays alone.
        group_index: group of each sequence.
        max_tokens: token budget of one micro-batch.

    Returns:
        For each sequence its joined unit and its size: computed tokens, plus 1 / ``REPEATED_TOKEN_SHARE`` for each
            token
        that another sequence of the joined unit computes. A joined unit stays within ``max_tokens`` unless it is a
        single unit of the loss.
    """
    joined, sizes = [0] * len(lengths), [0] * len(lengths)

    def counted(unit: Sequence[int], last: int | None) -> list[int]:
        """Return the size of each sequence of a unit that follows the sequence ``last``."""
        counts: list[int] = []
        for sequence in unit:
            repeated = shared.common(last, sequence) if last is not None else 0
            counts.append(lengths[sequence] - repeated + -(-repeated // REPEATED_TOKEN_SHARE))
            last = sequence
        return counts

    units = [sorted(unit, key=shared.place) for unit in units_in_order(unit_index)]
    number, filled = -1, 0
    group: int | None = None
    last: int | None = None
    # Neighbours in the ranking share the most tokens.
    for unit in sorted(units, key=lambda unit: shared.place(unit[0])):
        groups = {group_index[sequence] for sequence in unit}
        counts = counted(unit, last) if groups == {group} else []
        if groups != {group} or filled + sum(counts) > max_tokens:
            counts = counted(unit, None)
            number, filled, group = number + 1, 0, groups.pop() if len(groups) == 1 else None
        for sequence, count in zip(unit, counts, strict=True):
            joined[sequence], sizes[sequence] = number, count
        filled, last = filled + sum(counts), unit[-1]
    return joined, sizes
