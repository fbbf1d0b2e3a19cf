"""Columns, and which charts a run gets."""

from __future__ import annotations

import pytest

from chatlearn_observe.report.curves import charts_of, metric_columns


def test_columns_keep_gaps_and_non_finite_values() -> None:
    columns = metric_columns(
        [{"step": 0, "a": 1}, {"step": 1, "b": "nan"}, {"step": 2, "a": float("inf"), "b": 0.12345678}]
    )
    assert columns == {"a": [1.0, None, "inf"], "b": [None, "nan", 0.1234568]}


def test_a_chart_takes_the_first_metric_that_is_there() -> None:
    titles = {chart["title"]: chart for chart in charts_of({"grad_norm": [1.0], "reward": [1.0], "reward_std": [0.1]})}
    assert titles.keys() == {"Reward", "Gradient norm"}
    assert titles["Reward"]["low"] == [0.9]
    assert titles["Gradient norm"]["metric"] == "grad_norm"


def test_the_band_of_the_reward_stays_within_the_rewards_there_were() -> None:
    columns = {
        "reward": [None, 0.9, 0.5, 0.25, "nan"],
        "reward_std": [None, 0.3, 0.2, None, 0.1],
        "reward_min": [None, 0.0, 0.0, 0.0, 0.0],
        "reward_max": [None, 1.0, 1.0, 1.0, 1.0],
    }
    [chart] = charts_of(columns)
    assert chart["low"] == [None, pytest.approx(0.6), 0.3, 0.25, None]
    assert chart["high"] == [None, 1.0, 0.7, 0.25, None]


def test_a_band_between_two_metrics() -> None:
    columns = {"response_length/mean": [5.0], "response_length/min": [1.0], "response_length/max": [9.0]}
    [chart] = charts_of(columns)
    assert (chart["low"], chart["high"]) == ([1.0], [9.0])
    [chart] = charts_of({"response_length/mean": [5.0], "response_length/min": [1.0]})
    assert "low" not in chart


def test_every_named_evaluation_has_its_chart() -> None:
    charts = charts_of({"eval/accuracy": [0.5], "eval/math/accuracy": [0.2]})
    assert [(chart["title"], chart["points"]) for chart in charts] == [
        ("Held-out accuracy", True),
        ("Held-out accuracy: math", True),
    ]


def test_a_metric_that_was_never_measured_has_no_chart() -> None:
    assert charts_of({"reward": [None, None]}) == []
