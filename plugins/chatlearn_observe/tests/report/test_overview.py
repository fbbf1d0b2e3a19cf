"""The head of the report, for runs in every state."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatlearn_observe.report.overview import duration, overview_of, short_duration, shown_events
from chatlearn_observe.report.run_files import read_run


def test_a_complete_run(run_dir: Path) -> None:
    overview = overview_of(read_run(run_dir))
    assert (overview.name, overview.status, overview.error) == ("sums <grpo>", "complete", None)
    assert (overview.before, overview.after, overview.gained) == ("31.0%", "62.5%", "+31.5 points")
    facts = dict(overview.facts)
    assert facts["Steps"] == "6 of 6"
    assert facts["Samples"] == "72, excluded 1"
    assert ("python", "3.11.7") in overview.versions


def test_a_run_in_progress_takes_accuracy_and_time_from_its_metrics(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:5]))
    overview = overview_of(read_run(run_dir))
    assert overview.status_label == "Running, or killed"
    assert overview.before == "31.0%"
    assert overview.after == "34.8%"  # step 3: 0.31 + 0.4 * (1 - exp(-3/30)) = 0.34806
    assert dict(overview.facts)["Steps"] == "4 of 6"
    assert dict(overview.facts)["Wall time"].endswith("in steps so far")


def test_a_run_without_accuracy_shows_the_mean_reward(run_dir: Path) -> None:
    files = read_run(run_dir)
    assert overview_of(files).measure == "accuracy"
    files.summary = {"eval/reward": {"before": 0.25, "after": 1.5}}
    files.metrics = [{"step": 0, "eval/reward": 0.25}, {"step": 1, "eval/reward": 1.5}]
    overview = overview_of(files)
    assert (overview.measure, overview.before, overview.after, overview.gained) == (
        "mean reward",
        "0.25",
        "1.5",
        "+1.25",
    )


def test_the_time_of_a_resumed_run_is_that_of_all_its_steps(run_dir: Path) -> None:
    files = read_run(run_dir)
    files.events = []
    assert dict(overview_of(files).facts)["Wall time"] == "1 min 23 s"
    files.events = [{"event": "resume", "note": "resuming after step 2"}]
    files.metrics = [{"step": 0, "timing_s/eval": 5.0}, {"step": 1, "timing_s/step": 100.0, "timing_s/eval": 2.0}]
    assert dict(overview_of(files).facts)["Wall time"] == "1 min 47 s in steps, 1 min 23 s since it was last resumed"


def test_a_failed_run_points_to_its_page(run_dir: Path) -> None:
    files = read_run(run_dir)
    files.summary |= {"status": "failed", "error": "OSError: disk full"}
    label = "What happened, and how to continue"
    assert label not in dict(overview_of(files).facts), "there is none"
    (run_dir / "failure.md").write_text("# Run failed\n")
    assert dict(overview_of(files).facts)[label] == str(run_dir / "failure.md")


@pytest.mark.parametrize(
    ("status", "look"), [("completed", "complete"), ("failed", "failed"), ("interrupted", "open"), ("odd", "open")]
)
def test_statuses(run_dir: Path, status: str, look: str) -> None:
    files = read_run(run_dir)
    files.summary |= {"status": status, "error": "OSError: disk full"}
    overview = overview_of(files)
    assert overview.status == look
    assert overview.error == "OSError: disk full"


def test_many_events_are_cut_and_said(run_dir: Path) -> None:
    files = read_run(run_dir)
    files.events = [{"event": "warning", "step": i, "text": f"w{i}"} for i in range(600)]
    events = shown_events(files)
    assert len(events) == 501
    assert events[0].text.startswith("100 earlier events")
    assert (events[-1].step, events[-1].text) == ("599", "w599")


def test_an_event_shows_its_sentence_and_its_time(run_dir: Path) -> None:
    files = read_run(run_dir)
    rebuilt = {"event": "replica_rebuilt", "step": 4, "text": "replica 0 died and is rebuilt", "restart": 1}
    resumed = {"event": "resume", "note": "resuming after step 2"}
    files.events = [{"time": "2026-01-01T10:00:07+00:00", **rebuilt}, resumed]
    first, second = shown_events(files)
    assert (first.kind, first.step, first.text) == ("replica_rebuilt", "4", "replica 0 died and is rebuilt")
    assert first.time == "2026-01-01 10:00:07"
    assert (second.text, second.time) == ("resuming after step 2", "")


def test_durations() -> None:
    assert [duration(s) for s in (8.31, 59.99, 252, 11220)] == ["8.3 s", "60.0 s", "4 min 12 s", "3 h 07 min"]
    assert [short_duration(s) for s in (0.0412, 1.25, 75)] == ["41.2 ms", "1.25 s", "1 min 15 s"]
