"""Finds prompt tokens that sequences of a group have in common, so that a trunk computes them once.

The state of a token depends only on the tokens up to it. Sequences with equal beginnings therefore have equal states
there, and one computed row can serve all of them; its gradient is the sum of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch


class SharedPrompts:
    """The shared tokens of a batch's sequences, for any selection of them.

    A group's sequences are sorted by their prompt tokens, lexicographically: a sequence shares its longest common
    beginning with any earlier sequence also with the one directly before it.

    Args:
        lengths: number of tokens of each of the S sequences.
        ranking: the S sequences, group by group.
        common: entry k: number of tokens that sequences ``ranking[k - 1]`` and ``ranking[k]`` share; 0 between groups.
    """

    __slots__ = ("_common", "_lengths", "_place")

    def __init__(self, lengths: Sequence[int], ranking: Sequence[int], common: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._common = list(common)
        self._place = [0] * len(ranking)
        for place, sequence in enumerate(ranking):
            self._place[sequence] = place

    def place(self, sequence: int) -> int:
        """Return the sequence's position in the ranking."""
        return self._place[sequence]

    def common(self, first: int, second: int) -> int:
        """Return the number of tokens that two different sequences share from their start."""
        low, high = sorted((self._place[first], self._place[second]))
        return min(self._common[low + 1 : high + 1])

    def num_rows(self, indices: Sequence[int]) -> int:
        """Return the number of rows for the selected sequences if shared tokens are computed once."""
        return sum(self._lengths[i] for i in indices) - sum(shared for _, _, shared in self._chain(indices))

    def rows(self, indices: Sequence[int]) -> Tensor | None:
        """Return [T] int64: the computed row of each token of the selected sequences, concatenated in the given order.

        Rows are numbered in the order of the tokens that own them. None if the selected sequences share nothing.
        Example: ``[0, 1, 2, 0, 1, 3]`` for two sequences of 3 tokens that share 2.
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
        """Yield neighbours in the selection's ranking, as positions in ``indices``, with their number of
        shared tokens.
        """
        ranked = sorted(range(len(indices)), key=lambda k: self._place[indices[k]])
        for before, here in itertools.pairwise(ranked):
            yield before, here, self.common(indices[before], indices[here])


def find_shared_prompts(batch: TrainBatch) -> SharedPrompts | None:
    """Compare the prompts of each group's sequences, token by token.

    ``group_index`` only says which sequences to compare; equal tokens are shared. A prompt ends before the first token
    with a loss: completions are never shared, even if they are equal.

    Returns:
        None if no two sequences have an equal beginning.
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
        # Big-endian bytes of nonnegative numbers sort like the numbers.
        ranked = sorted(members, key=lambda s: prompts[s].astype(">i8").tobytes())
        ranking += ranked
        common += [0, *(_common_length(prompts[a], prompts[b]) for a, b in itertools.pairwise(ranked))]
    return SharedPrompts(batch.lengths, ranking, common) if any(common) else None


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
