from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_workers.runs import RunArray


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=1, max_size=6))
def test_what_is_told_in_short_comes_back(runs: list[tuple[int, int]]) -> None:
    array = np.repeat(*np.array(runs).T)
    short = RunArray.of(array)
    if short is not None:
        assert np.array_equal(short.array(), array)
        assert 2 * short.nbytes <= array.nbytes


def test_bits_are_kept() -> None:
    array = np.repeat(np.array([0.0, -0.0, np.nan, np.inf], np.float32), 100)
    short = RunArray.of(array)
    assert short is not None
    assert len(short.values) == 4
    assert short.array().tobytes() == array.tobytes()


def test_a_mask_of_any_length_takes_the_same() -> None:
    sizes = set()
    for length in (1_000, 100_000):
        short = RunArray.of(np.arange(length) >= 10)
        assert short is not None
        sizes.add(short.nbytes)
    assert sizes == {10}


@pytest.mark.parametrize(
    "array", [np.arange(1000), np.zeros(10), np.zeros((100, 100)), np.array(["a"] * 100), np.arange(1000) % 2 == 0]
)
def test_what_does_not_get_shorter_stays(array: np.ndarray) -> None:
    assert RunArray.of(array) is None
