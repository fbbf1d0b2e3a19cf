"""Bin packing and number partitioning: the two combinatorial problems behind batching."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count

SEARCH_STEPS = 12
"""Halvings of the interval between the lower bound and the first solution; 1/4096 of it is negligible."""

NEAR_PERFECT = 1 / 200
"""Relative excess over the ideal below which no search is worthwhile."""

_Bins = list[tuple[float, list[int]]]
"""(sum of costs, items) of each bin."""


def best_fit_decreasing(costs: Sequence[float], capacity: float) -> list[list[int]]:
    """Pack items into few bins: largest first, each into the fullest bin that still has room for it.

    For many items at most 11/9 of the optimum (Johnson 1974). No item may exceed ``capacity``.
    """
    bins: list[list[int]] = []
    room: list[tuple[float, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        at = bisect_left(room, (costs[item], -1))
        if at == len(room):
            bins.append([item])
            insort(room, (capacity - costs[item], len(bins) - 1))
        else:
            left, bin_ = room.pop(at)
            bins[bin_].append(item)
            insort(room, (left - costs[item], bin_))
    return bins


def longest_first(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Largest item first, each into the emptiest bin: at most 4/3 of the optimum, and the ideal plus one small item
    where there are many (Graham 1969). Some bins may stay empty.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0.0, bin_) for bin_ in range(num_bins)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, bin_ = loads[0]
        bins[bin_].append(item)
        heapq.heapreplace(loads, (load + costs[item], bin_))
    return bins


def partition(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Split items into ``num_bins`` bins (some may stay empty) so that the fullest bin has a small sum.

    With many items per bin, longest first (Graham 1969) is near perfect and fast. Otherwise the better of two other
    classics is used: differencing (Karmarkar and Karp 1982), and MULTIFIT (Coffman, Garey and Johnson 1978: a search
    for the smallest capacity at which best-fit needs no more bins), better with few items per bin. At most 4/3 of the
    optimum.
    """
    assert num_bins >= 1, f"num_bins is {num_bins}"
    low = max(sum(costs) / num_bins, max(costs, default=0.0))
    quick = longest_first(costs, num_bins)
    if _fullest(costs, quick) <= low * (1 + NEAR_PERFECT):
        return quick
    best = _differencing(costs, num_bins)
    high = _fullest(costs, best)
    for _ in range(SEARCH_STEPS):
        if low >= high:
            break
        middle = (low + high) / 2
        packed = best_fit_decreasing(costs, middle)
        if len(packed) <= num_bins:
            best, high = packed, _fullest(costs, packed)
        else:
            low = middle
    return best + [[] for _ in range(num_bins - len(best))]


def _fullest(costs: Sequence[float], bins: Sequence[Sequence[int]]) -> float:
    return max((sum(costs[item] for item in bin_) for bin_ in bins), default=0.0)


def _differencing(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Karmarkar-Karp, for any number of bins.

    Every item starts as a partition of its own (itself in one bin, nothing in the others). The two partitions whose
    fullest and emptiest bins differ most are merged, full bins against empty ones, until one is left.
    """
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
    return [items for _, items in heap[0][2]] if heap else []


def _merge(first: _Bins, second: _Bins, num_bins: int) -> _Bins:
    """Combine two partitions, the fullest bin of one with the emptiest of the other."""
    overlap = max(0, len(first) + len(second) - num_bins)
    apart = len(first) - overlap
    merged = first[:apart] + second[: len(second) - overlap]
    for (a, items), (b, others) in zip(first[apart:], reversed(second[len(second) - overlap :]), strict=True):
        merged.append((a + b, items + others))
    merged.sort(key=lambda entry: entry[0], reverse=True)
    return merged
