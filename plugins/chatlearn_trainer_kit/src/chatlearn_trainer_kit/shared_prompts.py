"""Prompt tokens that several sequences of a group have in common, so that a trunk computes them once.

The state of a token depends on the tokens up to it alone. Sequences that begin alike therefore have the same states as
long as they stay alike, and one computed row can stand for all of them; its gradient is the sum of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch


class SharedPrompts:
    """What the sequences of a batch have in common, for any selection of them.

    A group's sequences are ranked by the tokens of their prompts, as in a dictionary: the longest beginning that a
    sequence shares with any sequence before it, it shares with the one right before it.

    Args:
        lengths: tokens of each of the S sequences.
        ranking: the S sequences, group after group.
        common: entry k: tokens that sequences ``ranking[k - 1]`` and ``ranking[k]`` share; 0 between groups.
    """

    __slots__ = ("_common", "_lengths", "_place")

    def __init__(self, lengths: Sequence[int], ranking: Sequence[int], common: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._common = list(common)
        self._place = [0] * len(ranking)
        for place, sequence in enumerate(ranking):
            self._place[sequence] = place

    def place(self, sequence: int) -> int:
        """Where the sequence stands in the ranking."""
        return self._place[sequence]

    def common(self, first: int, second: int) -> int:
        """How many tokens two different sequences share, from their start."""
        low, high = sorted((self._place[first], self._place[second]))
        return min(self._common[low + 1 : high + 1])

    def num_rows(self, indices: Sequence[int]) -> int:
        """Rows that the selected sequences need when what they share is computed once."""
        return sum(self._lengths[i] for i in indices) - sum(shared for _, _, shared in self._chain(indices))

    def rows(self, indices: Sequence[int]) -> Tensor | None:
        """[T] int64: the computed row of each token of the selected sequences, laid end to end in the given order.

        Rows are numbered in the order of the tokens that own them. None if the selected sequences share nothing.
        """
        bounds = [0, *itertools.accumulate(self._lengths[i] for i in indices)]
        tokens = torch.arange(bounds[-1])
        owner = tokens.clone()
        for before, here, shared in self._chain(indices):
            owner[bounds[here] : bounds[here] + shared] = owner[bounds[before] : bounds[before] + shared]
        owns = owner == tokens
        if bool(owns.all()):
            return None
        return (owns.cumsum(0) - 1)[owner]

    def _chain(self, indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Neighbours in the selection's ranking, as positions in ``indices``, and how many tokens they share."""
        ranked = sorted(range(len(indices)), key=lambda k: self._place[indices[k]])
        for before, here in itertools.pairwise(ranked):
            yield before, here, self.common(indices[before], indices[here])


def find_shared_prompts(batch: TrainBatch) -> SharedPrompts | None:
    """Compare the prompts of each group's sequences, token by token.

    ``group_index`` only says which sequences to compare; what is shared are equal tokens. A prompt ends before the
    first token that is learned: completions are never shared, even where they are equal.

    Returns:
        None if no two sequences begin alike.
    """
    groups: dict[int, list[int]] = {}
    for sequence, group in enumerate(batch.group_index.tolist()):
        groups.setdefault(group, []).append(sequence)
    if len(groups) == batch.num_sequences:
        return None
    token_ids, learned = batch.token_ids.cpu().numpy(), batch.loss_mask.cpu().numpy()
    prompts: list[np.ndarray] = []
    for start, stop in itertools.pairwise(batch.cu_seqlens.tolist()):
        first = np.flatnonzero(learned[start:stop])[:1]
        prompts.append(token_ids[start : start + int(first[0]) if len(first) else stop])
    ranking: list[int] = []
    common: list[int] = []
    for members in groups.values():
        # Big-endian bytes of numbers that are not negative are ordered as the numbers are.
        ranked = sorted(members, key=lambda s: prompts[s].astype(">i8").tobytes())
        ranking += ranked
        common += [0, *(_common_length(prompts[a], prompts[b]) for a, b in itertools.pairwise(ranked))]
    return SharedPrompts(batch.lengths, ranking, common) if any(common) else None


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
