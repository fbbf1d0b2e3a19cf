from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.batching.balance import attention_cost, balance


@st.composite
def sequences_in_units(draw):
    lengths = draw(st.lists(st.integers(1, 60), max_size=30))
    units = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    return lengths, units


@given(drawn=sequences_in_units(), num_ranks=st.integers(1, 7))
def test_every_index_once_and_units_whole(drawn, num_ranks):
    lengths, units = drawn
    ranks = balance(lengths, units, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(i for rank in ranks for i in rank) == list(range(len(lengths)))
    for first, second in itertools.combinations(ranks, 2):
        assert not {units[i] for i in first} & {units[i] for i in second}
    assert ranks == balance(lengths, units, num_ranks)


def test_more_ranks_than_units():
    assert balance([5, 7], [0, 0], 3) == [[0, 1], [], []]
    assert balance([], [], 2) == [[], []]


def test_quadratic_cost_separates_long_sequences():
    """By tokens 100 equals 25 + 25 + 50; by attention the long one is worth far more than those three."""
    lengths = [100, 50, 25, 25, 40, 40]
    units = list(range(6))
    cost = attention_cost(hidden_size=1)
    by_attention = balance(lengths, units, 2, cost=cost)
    assert [0] in by_attention
    assert [0] not in balance(lengths, units, 2)


def test_attention_cost_is_linear_plus_quadratic():
    # 24 h^2 n linear and 2 h n^2 attention operations, in units of the former per token.
    h, n = 64, 1000
    assert attention_cost(h)(n) == pytest.approx((24 * h * h * n + 2 * h * n * n) / (24 * h * h))
