"""Shares and overlaps, against sums made by hand."""

from __future__ import annotations

import pytest

from chatlearn_observe.report.step_time import step_times


def line(number: int, **seconds: float) -> dict[str, float]:
    return {"step": number, **{f"timing_s/{name.replace('__', '/')}": value for name, value in seconds.items()}}


def test_the_parts_of_a_step() -> None:
    times = step_times(
        [
            {"step": 0, "eval/accuracy": 0.1},
            line(
                1, step=10, generate=4, reward=3, compute__reference=1, update=4, forward=1, backward=2, optimizer=0.5
            ),
            line(
                2,
                step=20,
                generate=8,
                reward=3,
                compute__reference=1,
                update=10,
                forward=4,
                backward=4,
                optimizer=1,
                eval=7,
            ),
        ]
    )
    assert times is not None
    parts = {part.name: part for part in times.parts}
    assert list(parts) == [
        "generate",
        "compute/reference",
        "update: forward",
        "update: backward",
        "update: optimizer",
        "update: rest",
        "rest",
        "eval",
        "reward",
    ]
    assert times.steps == [1, 2]
    assert parts["update: rest"].seconds == [0.5, 1.0]
    assert parts["rest"].seconds == [10 - 4 - 1 - 4, 20 - 8 - 1 - 10]
    assert parts["generate"].share == pytest.approx(12 / 30)
    assert parts["generate"].median_s == 6
    assert parts["eval"].median_s == 7  # of the one step in which it ran
    assert [parts[name].place for name in ("generate", "reward", "eval")] == ["stacked", "overlaps", "after"]
    assert sum(part.share for part in times.parts if part.place == "stacked") == pytest.approx(1)
    assert times.overlap_s == [0, 0]


def test_parts_that_ran_at_the_same_time() -> None:
    times = step_times([line(1, step=5, generate=4, compute__trainer=3)])
    assert times is not None
    assert times.overlap_s == [2]
    assert {part.name: part.seconds for part in times.parts}["rest"] == [0]


def test_an_update_without_parts_stays_whole() -> None:
    times = step_times([line(1, step=5, update=4)])
    assert times is not None
    assert [part.name for part in times.parts] == ["update", "rest"]


def test_nothing_timed() -> None:
    assert step_times([]) is None
    assert step_times([{"step": 1, "timing_s/step": "nan"}]) is None


def test_rollouts_that_are_made_ahead_are_not_part_of_a_step() -> None:
    times = step_times([line(1, step=5, generate=9, reward=2, wait_for_rollouts=1, update=3)])
    assert times is not None
    parts = {part.name: (part.place, part.seconds) for part in times.parts}
    assert parts == {
        "wait_for_rollouts": ("stacked", [1]),
        "update": ("stacked", [3]),
        "rest": ("stacked", [1]),
        "generate": ("ahead", [9]),
        "reward": ("ahead", [2]),
    }
    assert times.overlap_s == [0]
