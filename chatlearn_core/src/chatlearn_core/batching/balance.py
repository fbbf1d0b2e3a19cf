"""Distributes units over a fixed number of ranks or bins so that all hold about the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from chatlearn_core.batching.partition import partition


def balance(lengths: Sequence[int], unit_index: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Assign every sequence to one rank so that the largest number of tokens on a rank is small.

    Assigns whole units with ``partition``: at most 4/3 of the optimum and usually within a few percent. The result
    depends only on the arguments.

    Args:
        lengths: tokens of each sequence.
        unit_index: unit of each sequence; a unit stays together.
        num_ranks: at least 1; ranks beyond the number of units stay empty.

    Returns:
        For each rank the indices of its sequences, ascending. Ranks are ordered by their first index, empty ones last.
    """
    members = units_in_order(unit_index)
    bins = partition([sum(lengths[i] for i in unit) for unit in members], num_ranks)
    assigned = [sorted(i for unit in units for i in members[unit]) for units in bins]
    return sorted(assigned, key=lambda indices: indices[0] if indices else len(lengths))


def units_in_order(unit_index: Sequence[int]) -> list[list[int]]:
    """The sequences of each unit, units in order of first appearance."""
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(unit_index):
        members.setdefault(int(unit), []).append(index)
    return list(members.values())
