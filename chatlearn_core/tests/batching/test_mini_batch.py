from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.batching.mini_batch import mini_batches


@given(
    units=st.lists(st.integers(0, 12), max_size=40),
    num=st.integers(1, 8),
    seed=st.none() | st.integers(0, 100),
)
def test_nothing_lost_and_even(units, num, seed):
    def divide() -> list[list[int]]:
        return mini_batches(units, num, generator=None if seed is None else np.random.default_rng(seed))

    batches = divide()
    assert sorted(i for batch in batches for i in batch) == list(range(len(units)))
    assert len(batches) == min(num, len(set(units)))
    num_units = [len({units[i] for i in batch}) for batch in batches]
    assert sum(num_units) == len(set(units)), "a unit was split"
    if num_units:
        assert min(num_units) >= 1
        assert max(num_units) - min(num_units) <= 1
    assert batches == divide()


def test_order_is_kept_without_a_generator():
    assert mini_batches([0, 0, 1, 1, 2, 2, 3, 3], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_generator_shuffles_units():
    divided = {
        tuple(map(tuple, mini_batches([0, 0, 1, 1, 2, 2], 3, generator=np.random.default_rng(seed))))
        for seed in range(20)
    }
    assert len(divided) > 1
    assert all(set(batches) == {(0, 1), (2, 3), (4, 5)} for batches in divided)
