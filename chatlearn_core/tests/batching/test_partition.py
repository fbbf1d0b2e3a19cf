from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.batching.partition import _differencing, best_fit_decreasing, partition


@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), num_bins=st.integers(1, 3))
def test_within_four_thirds_of_the_optimum(costs, num_bins):
    optimum = min(
        max(sum(c for c, b in zip(costs, bins, strict=True) if b == k) for k in range(num_bins))
        for bins in itertools.product(range(num_bins), repeat=len(costs))
    )
    found = max(sum(costs[i] for i in bin_) for bin_ in partition(costs, num_bins))
    assert optimum <= found <= 4 / 3 * optimum + 1e-9


def test_differencing_by_hand():
    # 8 7 6 5 4 in two: 8-7=1, 6-5=1, 4-1=3, 3-1=2, so the sums differ by 2 (16 and 14).
    sums = sorted(sum([8, 7, 6, 5, 4][i] for i in bin_) for bin_ in _differencing([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


def test_search_finds_what_differencing_misses():
    # 8 + 7 and 6 + 5 + 4 are even.
    sums = [sum([8, 7, 6, 5, 4][i] for i in bin_) for bin_ in partition([8, 7, 6, 5, 4], 2)]
    assert sums == [15, 15]


def test_few_items_a_bin_stay_even():
    """512 groups of 8 completions with log-normal lengths over 128 ranks, four a rank: differencing is 9% off."""
    draw = random.Random(0)
    costs = [sum(draw.lognormvariate(6, 0.8) for _ in range(8)) for _ in range(512)]
    ideal = sum(costs) / 128
    assert max(sum(costs[i] for i in bin_) for bin_ in _differencing(costs, 128)) > 1.06 * ideal
    assert max(sum(costs[i] for i in bin_) for bin_ in partition(costs, 128)) < 1.03 * ideal


@given(costs=st.lists(st.integers(1, 50), max_size=40), capacity=st.integers(50, 120))
def test_best_fit(costs, capacity):
    """Every item once, within capacity, and no two bins that one could hold: so below twice the optimum."""
    bins = best_fit_decreasing(costs, capacity)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(costs)))
    sums = [sum(costs[i] for i in bin_) for bin_ in bins]
    assert all(0 < total <= capacity for total in sums)
    assert all(a + b > capacity for a, b in itertools.combinations(sums, 2))
