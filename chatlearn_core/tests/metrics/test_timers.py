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


def test_what_roles_do_is_the_trace_from_when_the_timers_were_made(clock: Clock) -> None:
    clock.now = 100.0
    measured = Timers()
    clock.now = 101.0
    with measured.measure("compute/reference", role="reference", action="logprobs", level=1):
        clock.now += 2.0
    with measured.measure("advantages"):
        clock.now += 1.0
    assert measured.trace() == [
        {"role": "reference", "action": "logprobs", "level": 1, "start_s": 1.0, "stop_s": 3.0, "calls": 1}
    ]


def test_calls_of_one_kind_are_one_entry_and_moves_are_each_their_own(clock: Clock) -> None:
    measured = Timers()
    for live in (0, 8):
        with measured.measure("onload", role="trainer") as facts:
            clock.now += 1.0
            facts["live_bytes"] = live
        with measured.measure("update", role="trainer"):
            clock.now += 2.0
    entries = [(e["action"], e["start_s"], e["stop_s"], e.get("live_bytes", e.get("calls"))) for e in measured.trace()]
    assert entries == [("onload", 0.0, 1.0, 0), ("update", 1.0, 6.0, 2), ("onload", 3.0, 4.0, 8)]


def test_the_trace_of_an_evaluation_is_told_apart_and_its_times_are_not_the_steps(clock: Clock) -> None:
    measured, apart = Timers(), Timers()
    for timers_of in (measured, apart):
        with timers_of.measure("generate", role="generator", level=0):
            clock.now += 1.0
    measured.adopt(apart, during="eval")
    assert [(e["start_s"], e.get("during")) for e in measured.trace()] == [(0.0, None), (1.0, "eval")]
    assert measured.seconds("generate") == 1.0


def test_a_part_with_timers_of_its_own_is_included_from_when_it_began(clock: Clock) -> None:
    """Rollouts may begin before the step that trains on them does."""
    part = Timers()
    with part.measure("generate", role="generator"):
        clock.now += 2
        step = Timers()
        with step.measure("generate"), step.measure("update", role="trainer"):
            clock.now += 3
    step.include(part)
    assert step.seconds("generate") == 5
    assert [(entry["action"], entry["start_s"], entry["stop_s"]) for entry in step.trace()] == [
        ("generate", -2, 3),
        ("update", 0, 3),
    ]
