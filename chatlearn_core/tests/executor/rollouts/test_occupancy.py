"""Idle shares, on a clock that the test moves."""

from __future__ import annotations

import pytest

from chatlearn_core.executor.rollouts.occupancy import MAX_NAMED, Occupancy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_is_idle_while_another_works_and_it_has_nothing() -> None:
    clock = Clock()
    occupancy = Occupancy(3, clock)
    occupancy.opened(0)
    occupancy.opened(1)
    clock.now += 2
    occupancy.opened(1)
    occupancy.closed(1)
    clock.now += 2
    occupancy.closed(1)  # busy for 4 of 10 s
    clock.now += 6
    occupancy.closed(0)
    assert occupancy.idle_shares() == pytest.approx([0.0, 0.6, 1.0])


def test_time_in_which_nothing_is_generated_does_not_count() -> None:
    clock = Clock()
    occupancy = Occupancy(2, clock)
    for replica, seconds in ((0, 3.0), (1, 1.0)):
        occupancy.opened(replica)
        clock.now += seconds
        occupancy.closed(replica)
        clock.now += 50  # training
    assert occupancy.idle_shares() == pytest.approx([0.25, 0.75])


def test_what_is_open_counts_until_now() -> None:
    clock = Clock()
    occupancy = Occupancy(2, clock, [1, 0])
    clock.now += 4
    occupancy.opened(1)
    clock.now += 4
    assert occupancy.idle_shares() == pytest.approx([0.0, 0.5])


def test_metrics_are_of_several_replicas_and_name_few() -> None:
    clock = Clock()
    alone, few, many = Occupancy(1, clock), Occupancy(2, clock), Occupancy(MAX_NAMED + 1, clock)
    for occupancy in (alone, few, many):
        occupancy.opened(0)
    clock.now += 1
    assert alone.metrics(0) == {}
    assert {name: metric.value for name, metric in few.metrics(0).items()} == {
        "perf/replica_idle": 0.5,
        "perf/replica_idle_max": 1.0,
        "perf/replica_idle/0": 0.0,
        "perf/replica_idle/1": 1.0,
    }
    assert set(many.metrics(0)) == {"perf/replica_idle", "perf/replica_idle_max"}
    assert alone.metrics(3)["rollout/retries"].value == 3
