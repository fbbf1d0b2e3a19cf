"""Spreading units over a fixed number of ranks or bins so that all carry about the same cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

Cost = Callable[[int], float]
"""Sequence length (tokens) -> what computing it costs, in any unit."""


_Bins = list[tuple[float, list[int]]]
"""(sum of costs, items) of each bin."""


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

    Karmarkar-Karp's largest differencing method on whole units; at most 4/3 of the optimum and usually far closer.
    The result is a function of the arguments alone.

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


def partition(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Karmarkar-Karp: split item indices into ``num_bins`` lists with sums as equal as it can make them.

    Every item starts as a partition of its own (itself in one bin, nothing in the others). The two partitions whose
    fullest and emptiest bins differ most are merged, full bins against empty ones, until one is left.
    """
    assert num_bins >= 1, f"num_bins is {num_bins}"
    # A partition is its filled bins, fullest first; the empty ones are implied. Ties in spread are broken by age, never
    # by comparing bins, so that the result depends on the input alone.
    age = count()
    heap: list[tuple[float, int, _Bins]] = [
        (-float(cost) if num_bins > 1 else 0.0, next(age), [(float(cost), [item])]) for item, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], num_bins)
        emptiest = merged[-1][0] if len(merged) == num_bins else 0.0
        heapq.heappush(heap, (emptiest - merged[0][0], next(age), merged))
    filled = [items for _, items in heap[0][2]] if heap else []
    return filled + [[] for _ in range(num_bins - len(filled))]


def _merge(first: _Bins, second: _Bins, num_bins: int) -> _Bins:
    """Lay two partitions over each other, the fullest bin of one on the emptiest of the other."""
    overlap = max(0, len(first) + len(second) - num_bins)
    apart = len(first) - overlap
    merged = first[:apart] + second[: len(second) - overlap]
    for (a, items), (b, others) in zip(first[apart:], reversed(second[len(second) - overlap :]), strict=True):
        merged.append((a + b, items + others))
    merged.sort(key=lambda entry: entry[0], reverse=True)
    return merged
