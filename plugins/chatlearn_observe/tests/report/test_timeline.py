"""The time line and the staleness of an asynchronous run, against sums made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatlearn_observe.report import write_report
from chatlearn_observe.report.timeline import MOST_REPLICAS, MOST_STEPS, shown_timeline, staleness_of

Line = Callable[..., dict[str, Any]]


def test_steps_follow_each_other_and_shares_leave_out_the_first(timeline_line: Line) -> None:
    notes: list[str] = []
    records = [timeline_line(1, seconds=10.0), timeline_line(2), timeline_line(3, seconds=5.0), timeline_line(3)]
    shown = shown_timeline(records, notes)
    assert shown is not None
    assert [(line["start"], line["stop"]) for line in shown.lines] == [(0.0, 10.0), (10.0, 14.0), (14.0, 18.0)]
    assert shown.lines[1]["waiting"] == [[10.0, 11.0]]
    assert shown.lines[1]["lanes"] == [[[10.0, 14.0]], [[10.0, 11.0], [12.0, 13.0]]]
    assert shown.lanes == ["generator 0", "generator 1"]
    # Steps 2 and 3 of 4 s each: 1 s of waiting, 2 s of updates, 0.5 s of weight sync.
    assert shown.trainer.shares == {"updating": 0.5, "waiting": 0.25, "syncing": 0.125, "other": 0.125}
    assert shown.generators[0].shares == {"sampling": 0.75, "idle": 0.25}  # (4 + 2) of 2 x 4 s
    assert (shown.from_step, shown.left_out, notes) == (2, "", [])


@pytest.mark.parametrize(
    "change",
    [
        {"step": "3"},
        {"seconds": 0},
        {"waiting": [[2, 1]]},
        {"syncing": None},
        {"generators": {"generator": [[1, 2]]}},
        {"generators": []},
    ],
)
def test_a_line_of_another_kind_is_left_out_and_reported(change: dict[str, Any], timeline_line: Line) -> None:
    notes: list[str] = []
    shown = shown_timeline([timeline_line(1), timeline_line(2) | change], notes)
    assert shown is not None
    assert [line["step"] for line in shown.lines] == [1]
    assert len(notes) == 1
    assert notes[0].startswith("timeline.jsonl: a line is not as chatlearn-async writes it, and is left out: {'step'")


def test_a_long_run_of_a_large_fleet_shows_its_ends_and_counts_everything(timeline_line: Line) -> None:
    records = [timeline_line(step, replicas=MOST_REPLICAS + 8) for step in range(1, MOST_STEPS + 11)]
    records[MOST_STEPS // 2 + 3]["waiting"] = [[0.0, 2.0]]  # in a step that is not shown
    shown = shown_timeline(records, [])
    assert shown is not None
    assert len(shown.lines) == MOST_STEPS
    assert len(shown.lines[0]["lanes"]) == len(shown.lanes) == MOST_REPLICAS
    assert shown.left_out == "steps 101 to 110 and replicas 32 to 39 of generator"
    assert shown.trainer.shares["waiting"] == pytest.approx((208 * 1.0 + 2.0) / (209 * 4.0))


def test_staleness_is_the_mean_over_steps() -> None:
    found = staleness_of(
        [
            {"step": 0, "eval/accuracy": 0.5},
            {"step": 1, "rollout/staleness/0": 1.0, "rollout/dropped_stale": 0.0},
            {"step": 2, "rollout/staleness/0": 0.25, "rollout/staleness/2": 0.75, "rollout/dropped_stale": 0.5},
        ]
    )
    assert found is not None
    assert (found.ages, found.shares) == ([0, 1, 2], [0.625, 0.0, 0.375])
    assert (found.mean, found.dropped) == (0.75, 0.25)
    assert staleness_of([{"step": 1, "rollout/staleness_mean": 1.0}]) is None


def test_the_page_has_the_section_only_for_asynchronous_runs(
    run_dir: Path, characters: None, request: pytest.FixtureRequest
) -> None:
    assert 'id="timeline"' not in write_report(run_dir).path.read_text()
    request.getfixturevalue("async_run_dir")
    page = write_report(run_dir).path.read_text()
    section = page[page.index('<section id="timeline"') : page.index('<section id="rollouts"')]
    assert 'waiting for rollouts</th><td class="number">25.0%</td><td class="number">–</td>' in section
    assert 'sampling</th><td class="number">–</td><td class="number">75.0%</td>' in section
