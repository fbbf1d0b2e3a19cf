"""Spreading units over a fixed number of ranks or bins so that all carry about the same cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatlearn_core.batching.partition import partition

Cost = Callable[[int], float]
"""Sequence length (tokens) -> what computing it costs, in any unit."""


def token_cost(length: int) -> float:
    """A sequence costs its tokens: right while the linear layers dominate."""
    return float(length)


def attention_cost(hidden_size: int) -> Cost:
    """A cost that counts attention's quadratic part.

    A transformer layer takes about 24·h²·n operations in its linear layers and, with a causal kernel, 2·h·n² in
    attention; in units of the former a sequence of n tokens costs n + n² / (12·h).
    """
    return lambda length: length + length * length / (12.0 * hidden_size)


def balance(
    lengths: Sequence[int], unit_index: Sequence[int], num_ranks: int, *, cost: Cost = token_cost
) -> list[list[int]]:
    """Assign every sequence to one rank so that the costliest rank costs as little as possible.

    Whole units, by ``partition``: at most 4/3 of the optimum and usually within a few percent. The result is a function
    of the arguments alone.

    Args:
        lengths: tokens of each sequence.
        unit_index: unit of each sequence; a unit stays together.
        num_ranks: at least 1; ranks beyond the number of units stay empty.
        cost: of one sequence by its length.

    Returns:
        For each rank the indices of its sequences, ascending. Ranks are ordered by their first index, empty ones last.
    """
    members = units_in_order(unit_index)
    costs = [sum(cost(lengths[i]) for i in unit) for unit in members]
    bins = partition(costs, num_ranks)
    assigned = [sorted(i for unit in units for i in members[unit]) for units in bins]
    return sorted(assigned, key=lambda indices: indices[0] if indices else len(lengths))


def units_in_order(unit_index: Sequence[int]) -> list[list[int]]:
    """The sequences of each unit, units in order of first appearance."""
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(unit_index):
        members.setdefault(int(unit), []).append(index)
    return list(members.values())
