"""How a rank computes a batch: cut into micro-batches, prompts shared inside each, outputs put back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from chatlearn_core.batching import micro_batches, padded_micro_batches, padded_tokens
from chatlearn_core.batching.balance import units_in_order
from chatlearn_core.types import Outputs, TrainBatch
from chatlearn_trainer_kit.shared_prompts import SharedPrompts, find_shared_prompts

REPEATED_TOKEN_SHARE = 8
"""A token that takes its row from another sequence counts an eighth of a computed one. Attention still holds its query,
key, value and output; of what a decoder layer keeps for the backward pass that is about an eighth (with key and value
heads fewer than query heads and an MLP of three to four times the width). Not counted at all, a long prompt with many
short completions would exceed the memory that the budget stands for."""


class MicroBatches:
    """The cuts of a batch: lists of sequence indices, at least one, and the same number on every rank.

    Iterating gives the lists; ``on`` gives what to compute.

    Args:
        batch: on the host.
        max_tokens: budget of one micro-batch.
        share_prompts: compute equal beginnings of a group's prompts once in each micro-batch.
        padded: sequences are padded to the longest of their micro-batch, which counts in the budget.
        agree: takes this rank's number of micro-batches and returns the largest of all ranks.
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
        assert not (padded and share_prompts), "a sequence with a row of its own shares none"
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
        """Micro-batches that hold a sequence."""
        return sum(1 for cut in self.cuts if cut)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that pass through the trunk, padding included."""
        if self.padded:
            return sum(padded_tokens(self.batch.lengths, cut) for cut in self.cuts)
        return self.batch.num_tokens if self.shared is None else sum(self.shared.num_rows(cut) for cut in self.cuts)

    def on(self, device: torch.device) -> Iterator[tuple[TrainBatch, Tensor | None]]:
        """Each micro-batch, brought to the device when its turn comes.

        Yields:
            the batch, and [T] int64 the computed row of each of its tokens; None: each token has its own.
        """
        for cut in self.cuts:
            is_whole = len(self.cuts) == 1 and cut == list(range(self.batch.num_sequences))
            micro = self.batch if is_whole else self.batch.select(cut)
            rows = self.shared.rows(cut) if self.shared is not None else None
            yield micro.to(device), rows

    def in_batch_order(self, pieces: Sequence[Outputs]) -> Outputs:
        """The micro-batches' outputs joined, in the order of the batch."""
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
    """Join the units of one group, so that what they share is computed once, as far as they fit into one micro-batch.

    Args:
        shared: of the batch.
        lengths: tokens of each sequence.
        unit_index: the loss's unit of each sequence. Units are joined, never split; one that spans groups stays alone.
        group_index: group of each sequence.
        max_tokens: budget of one micro-batch.

    Returns:
        For each sequence its joined unit, and what it counts in it: computed tokens, and ``REPEATED_TOKEN_SHARE`` of a
        token for one that another sequence of the joined unit computes. A joined unit stays within ``max_tokens``
        unless it is a single one of the loss's.
    """
    joined, sizes = [0] * len(lengths), [0] * len(lengths)

    def counted(unit: Sequence[int], last: int | None) -> list[int]:
        """What each sequence of a unit counts that follows the sequence ``last``."""
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
    # Neighbours in the ranking share most.
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
