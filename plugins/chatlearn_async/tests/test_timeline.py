"""Lines of the time line, against intervals written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatlearn_async.busy_time import BusyTime
from chatlearn_async.timeline import FILE, Timeline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timeline(folder: Path, clock: Clock) -> Timeline:
    return Timeline(folder / FILE, clock, lambda: 1000.0 + clock.now)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_line_covers_the_time_since_the_one_before(tmp_path: Path, clock: Clock) -> None:
    found = timeline(tmp_path, clock)
    found.opened("generator", 0, 1)
    found.opened("generator", 1, 1)
    clock.now = 102.0
    found.opened("generator", 1, 0)  # a request ends ...
    clock.now = 103.0
    found.opened("generator", 1, 1)  # ... and the next begins
    found.waited(100.5)
    clock.now = 105.0
    found.updates_end()
    found.sync_begins(pauses=False)
    clock.now = 105.5
    found.opened("generator", 1, 0)  # aborted
    clock.now = 106.0
    found.sync_ends(1)
    clock.now = 107.0
    found.waited(106.0)
    clock.now = 108.0
    found.updates_end()
    found.sync_begins(pauses=False)
    found.sync_ends(2)
    assert lines(tmp_path) == [
        {
            "step": 1,
            "time": 1100.0,
            "seconds": 6.0,
            "waiting": [[0.5, 3.0]],
            "updating": [[3.0, 5.0]],
            "syncing": [[5.0, 6.0]],
            "generators": {"generator": [[[0.0, 6.0]], [[0.0, 2.0], [3.0, 5.5]]]},
        },
        {
            "step": 2,
            "time": 1106.0,
            "seconds": 2.0,
            "waiting": [[0.0, 1.0]],
            "updating": [[1.0, 2.0]],
            "syncing": [],
            "generators": {"generator": [[[0.0, 2.0]], []]},
        },
    ]


def test_paused_replicas_do_not_sample_during_a_sync_and_a_drain_is_a_wait(tmp_path: Path, clock: Clock) -> None:
    found = timeline(tmp_path, clock)
    found.opened("generator", 0, 3)
    clock.now = 101.0
    found.updates_end()
    clock.now = 102.0
    found.waited(101.0)  # for rollouts, before the sync
    found.sync_begins(pauses=True)
    clock.now = 104.0
    found.sync_ends(1)
    clock.now = 105.0
    found.updates_end()
    found.sync_begins(pauses=True)
    found.sync_ends(2)
    first, second = lines(tmp_path)
    assert (first["waiting"], first["updating"], first["syncing"]) == ([[1.0, 2.0]], [[0.0, 1.0]], [[2.0, 4.0]])
    assert [line["generators"]["generator"] for line in (first, second)] == [[[[0.0, 2.0]]], [[[0.0, 1.0]]]]


def test_time_before_a_restart_does_not_count(tmp_path: Path, clock: Clock) -> None:
    found = timeline(tmp_path, clock)
    found.waited(100.0)
    clock.now = 150.0
    found.restart()
    found.updates_end()
    found.sync_begins(pauses=False)
    clock.now = 151.0
    found.sync_ends(1)
    [line] = lines(tmp_path)
    assert (line["time"], line["seconds"], line["waiting"]) == (1150.0, 1.0, [])


def test_a_pause_is_not_busy_time(clock: Clock) -> None:
    busy = BusyTime(clock)
    busy.begin()
    clock.now += 2.0
    busy.begin()
    busy.pause()
    clock.now += 10.0
    busy.go_on()
    clock.now += 1.0
    busy.end()
    assert busy.take() == 3.0
    busy.pause()
    busy.end()
    clock.now += 5.0
    busy.go_on()
    assert busy.take() == 0.0
