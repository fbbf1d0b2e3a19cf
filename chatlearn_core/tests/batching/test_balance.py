from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.batching.balance import balance


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
