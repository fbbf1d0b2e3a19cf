"""Timers on a clock that the test moves."""

from __future__ import annotations

import pytest

from chatlearn_core.metrics import Timers, timers


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timers, "time", clock)
    return clock


def test_spans_of_one_name_add_up(clock: Clock) -> None:
    measured = Timers()
    for _ in range(2):
        with measured.measure("update"):
            clock.now += 3.0
        clock.now += 10.0
    assert measured.seconds("update") == 6.0
    assert measured.metrics()["timing_s/update"].value == 6.0


def test_overlapping_spans_count_once(clock: Clock) -> None:
    measured = Timers()
    with measured.measure("reward"):
        clock.now += 1.0
        with measured.measure("reward"):
            clock.now += 4.0
        clock.now += 1.0
    assert measured.seconds("reward") == 6.0


def test_a_block_that_raises_is_measured(clock: Clock) -> None:
    measured = Timers()

    def fail() -> None:
        with measured.measure("update"):
            clock.now += 2.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert measured.seconds("update") == 2.0


def test_what_was_never_measured_took_no_time() -> None:
    assert Timers().seconds("sync") == 0.0
