from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.batching.micro_batch import micro_batches


@st.composite
def sequences_in_units(draw):
    lengths = draw(st.lists(st.integers(1, 60), max_size=30))
    units = draw(st.lists(st.integers(0, 15), min_size=len(lengths), max_size=len(lengths)))
    return lengths, units


@given(drawn=sequences_in_units(), max_tokens=st.integers(1, 150), at_least=st.integers(0, 6))
def test_contract(drawn, max_tokens, at_least):
    lengths, units = drawn
    batches = micro_batches(lengths, units, max_tokens, at_least=at_least)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert len(batches) >= at_least
    for first, second in itertools.combinations(batches, 2):
        assert not {units[i] for i in first} & {units[i] for i in second}
    for batch in batches:
        tokens = sum(lengths[i] for i in batch)
        assert tokens <= max_tokens or len({units[i] for i in batch}) == 1
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert sizes == sorted(sizes, reverse=True)
    assert batches == micro_batches(lengths, units, max_tokens, at_least=at_least)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), max_tokens=st.integers(60, 200))
def test_few_micro_batches(lengths, max_tokens):
    """Filled to more than half on average, so there are fewer than twice as many as the tokens require."""
    batches = micro_batches(lengths, range(len(lengths)), max_tokens)
    assert len(batches) < max(2 * sum(lengths) / max_tokens, 1) + 1


def test_evenly_filled():
    """Seven sequences of 10 with a budget of 40 need two micro-batches: 40 and 30, not 40, 20 and 10."""
    assert sorted(len(batch) for batch in micro_batches([10] * 7, range(7), 40)) == [3, 4]
    # Best-fit gives 50 + 40 | 30 + 20 + 10 + 10 at a budget of 90; an even cut of the 160 tokens is 80 and 80.
    lengths = [50, 40, 30, 20, 10, 10]
    assert [sum(lengths[i] for i in batch) for batch in micro_batches(lengths, range(6), 90)] == [80, 80]


def test_falls_back_where_an_even_cut_breaks_the_budget():
    """Three bins of 10 exist (6+4, 5+5, 5+3+2) and must be found although differencing may not hit them exactly."""
    lengths = [6, 5, 5, 5, 4, 3, 2]
    batches = micro_batches(lengths, range(7), 10)
    assert len(batches) == 3
    assert all(sum(lengths[i] for i in batch) == 10 for batch in batches)


def test_a_unit_above_the_budget_stands_alone():
    batches = micro_batches([30, 30, 10, 10], [0, 0, 1, 2], 40)
    assert batches == [[0, 1], [2, 3]]


def test_agreed_number_spreads_and_pads():
    assert micro_batches([10, 10, 10], range(3), 100, at_least=3) == [[0], [1], [2]]
    assert micro_batches([10], [0], 100, at_least=3) == [[0], [], []]
    assert micro_batches([], [], 100, at_least=2) == [[], []]
    assert micro_batches([], [], 100) == []


def test_packs_realistic_lengths_almost_fully():
    """256 sequences of 60 to 380 tokens (about GSM8K's prompt and solution) into budgets of 4096."""
    lengths = [60 + (i * 7919) % 321 for i in range(256)]
    batches = micro_batches(lengths, range(256), 4096)
    assert len(batches) == math.ceil(sum(lengths) / 4096)
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 4
    assert sum(sizes) / (4096 * len(sizes)) > 0.9
