from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_losses import best_and_worst, groups, ordered_pairs


def test_a_pair():
    pairs = ordered_pairs(torch.tensor([4, 4]), torch.tensor([0.0, 1.0]))
    assert (pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.weights.tolist()) == ([1], [0], [1.0])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_every_ordered_pair_of_a_group_once_and_weights_add_up_to_one(rows):
    """By a loop over all combinations."""
    group_index = torch.tensor([group for group, _ in rows], dtype=torch.int64)
    ranks = torch.tensor([float(rank) for _, rank in rows])
    pairs = ordered_pairs(group_index, ranks)
    wanted = {
        (i, j)
        for i, j in itertools.permutations(range(len(rows)), 2)
        if rows[i][0] == rows[j][0] and rows[i][1] > rows[j][1]
    }
    found = list(zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True))
    assert (set(found), len(found)) == (wanted, len(wanted))
    for members in groups(group_index):
        own = [weight for (i, _), weight in zip(found, pairs.weights.tolist(), strict=True) if i in members]
        assert sum(own) == pytest.approx(float(bool(own)))


def test_best_and_worst_are_the_first_of_equals():
    assert best_and_worst([1.0, 3.0, 0.0, 3.0, 0.0]) == (1, 2)
    assert best_and_worst([2.0, 2.0]) is None
