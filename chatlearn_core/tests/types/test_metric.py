"""Merging partial metrics is exact: whatever the split, the result is that of the whole."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Metric, merge_metrics

# Integers, so that sums are exact in every order.
VALUES = st.lists(st.integers(-1000, 1000), min_size=1, max_size=20)


@settings(deadline=None)
@given(VALUES, st.data())
def test_any_split_gives_the_same(values: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(values)))
    parts = [part for part in (values[:cut], values[cut:]) if part]
    merged = merge_metrics(
        *(
            {
                "mean": Metric(sum(part), len(part)),
                "sum": Metric(sum(part), reducer="sum"),
                "max": Metric(max(part), reducer="max"),
                "min": Metric(min(part), reducer="min"),
            }
            for part in parts
        )
    )
    assert merged["mean"].value == sum(values) / len(values)
    assert merged["sum"].value == sum(values)
    assert merged["max"].value == max(values)
    assert merged["min"].value == min(values)


def test_a_mean_is_weighted_by_counts() -> None:
    assert Metric(10.0, 4.0).merge(Metric(2.0, 1.0)).value == 12.0 / 5.0


def test_a_mean_over_nothing_is_zero() -> None:
    assert Metric(0.0, 0.0).value == 0.0


def test_names_that_only_one_part_has_are_kept() -> None:
    merged = merge_metrics({"a": Metric(1.0)}, {"b": Metric(2.0)}, {})
    assert {name: metric.value for name, metric in merged.items()} == {"a": 1.0, "b": 2.0}


def test_nan_is_not_lost() -> None:
    assert math.isnan(Metric(float("nan")).merge(Metric(1.0)).value)


def test_different_reducers_do_not_merge() -> None:
    with pytest.raises(AssertionError, match="cannot merge a max with a min"):
        Metric(1.0, reducer="max").merge(Metric(1.0, reducer="min"))


def test_parts_that_are_reduced_differently_are_named() -> None:
    with pytest.raises(BackendError, match=r"Metric 'reward/mean' is reported as a max and as a mean"):
        merge_metrics({"reward/mean": Metric(1.0, reducer="max"), "a": Metric(1.0)}, {"reward/mean": Metric(2.0)})
