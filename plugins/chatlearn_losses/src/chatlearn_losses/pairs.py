"""Selects the completions of a prompt to compare: ordered pairs, from ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """N comparisons: places of sequences in a batch."""

    chosen: Tensor
    """[N] int64"""
    rejected: Tensor
    """[N] int64"""
    weights: Tensor
    """[N] float32: the pairs of one prompt add up to 1, so that a prompt with many completions has the same weight as
    one with two (InstructGPT, arXiv 2203.02155, eq. 1).
    """


def ordered_pairs(group_index: Tensor, ranks: Tensor) -> Pairs:
    """Return every pair of sequences of one group in which the first has the larger rank.

    Args:
        group_index: [S] int64; sequences of one prompt share it.
        ranks: [S], larger is better.

    Returns:
        the pairs on the device of ``ranks``, ordered by chosen, then by rejected sequence within their group.
    """
    values = ranks.tolist()
    chosen: list[int] = []
    rejected: list[int] = []
    weights: list[float] = []
    for members in groups(group_index):
        found = [(one, other) for one in members for other in members if values[one] > values[other]]
        chosen += [one for one, _ in found]
        rejected += [other for _, other in found]
        weights += [1.0 / len(found) for _ in found]
    device = ranks.device
    return Pairs(
        torch.tensor(chosen, dtype=torch.int64, device=device),
        torch.tensor(rejected, dtype=torch.int64, device=device),
        torch.tensor(weights, dtype=torch.float32, device=device),
    )


def groups(group_index: Tensor) -> list[list[int]]:
    """Return the sequences of each group, in the order of the batch.

    Args:
        group_index: [S] int64
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_index.tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())


def best_and_worst(ranks: Sequence[float]) -> tuple[int, int] | None:
    """Return the places of the first largest and the first smallest rank; None if all are equal."""
    best = max(range(len(ranks)), key=ranks.__getitem__)
    worst = min(range(len(ranks)), key=ranks.__getitem__)
    return None if ranks[best] == ranks[worst] else (best, worst)
