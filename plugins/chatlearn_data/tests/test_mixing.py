"""Shares of several datasets, exact at every moment."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_data.mixing import next_dataset, shares

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 1.5, 2.0, 7.0, 100.0]), min_size=1, max_size=6)


def test_weights_count_as_the_decimals_they_are_written_as() -> None:
    assert shares([0.1, 0.2]) == (Fraction(1, 3), Fraction(2, 3))
    assert shares([1e-7, 1]) == (Fraction(1, 10**7 + 1), Fraction(10**7, 10**7 + 1))


def test_two_to_one_is_drawn_in_turn() -> None:
    drawn = [0, 0]
    order = []
    for _ in range(9):
        index = next_dataset(shares([2, 1]), drawn)
        drawn[index] += 1
        order.append(index)
    assert order.count(0) == 6
    assert all(sorted(order[i : i + 3]) == [0, 0, 1] for i in range(0, 9, 3))


@given(WEIGHTS, st.integers(1, 300))
def test_no_dataset_is_ever_off_its_share_by_tijdemans_bound(weights: list[float], turns: int) -> None:
    """The bound 1 - 1/(2k - 2) is the theorem of the paper that the rule is from."""
    exact = shares(weights)
    bound = 1 - Fraction(1, 2 * len(weights) - 2) if len(weights) > 1 else Fraction(0)
    drawn = [0] * len(weights)
    for turn in range(1, turns + 1):
        drawn[next_dataset(exact, drawn)] += 1
        assert all(abs(share * turn - n) <= bound for share, n in zip(exact, drawn, strict=True))


@pytest.mark.parametrize("weights", [[1, 1], [3, 2, 1], [0.5, 0.3, 0.2], [0.1, 0.1, 0.1, 0.7]])
def test_shares_are_met_exactly_at_every_common_multiple(weights: list[float]) -> None:
    exact = shares(weights)
    cycle = max(share.denominator for share in exact)
    drawn = [0] * len(weights)
    for turn in range(1, 4 * cycle + 1):
        drawn[next_dataset(exact, drawn)] += 1
        if turn % cycle == 0:
            assert drawn == [share * turn for share in exact]
