"""The page about a run that failed: what, where, after what, what is saved, and how to continue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ChatLearnError,
    ReplicaLostError,
    TrainerLostError,
    WorkerPlace,
)
from chatlearn_core.types import RunFailure
from chatlearn_observe import plugin
from chatlearn_observe.failure_page import failure_page

STACK = '  File "/site/acme/trainer.py", line 12, in update\n    dist.all_reduce(gradient)\n'
PLACE = WorkerPlace("trainer", "rank 1 of 2", "update", 4711, "node3")


def hang() -> BackendTimeoutError:
    said = "role 'trainer', rank 1 of 2 (process 4711 on node3): update did not return within 60 s. It hangs here:"
    text = f"{said}\n{STACK}"
    return BackendTimeoutError(text).at(PLACE, STACK)


def failure(**changed: Any) -> RunFailure:
    made = RunFailure(
        name="sums",
        phase="updating",
        phase_s=61.0,
        step=7,
        num_complete=6,
        planned_steps=100,
        kept="A checkpoint of step 6 is in runs/sums/checkpoints.",
        run_dir=Path("runs/sums"),
        events=(),
        wall_s=3700.0,
        versions={"python": "3.11.7", "chatlearn-core": "0.1.0"},
    )
    return replace(made, **changed)


def test_the_page_says_what_failed_where_when_and_how_to_continue() -> None:
    page = failure_page(hang(), failure())
    assert page.startswith("# Run 'sums' failed while updating, step 7 of 100\n")
    for row in (
        "| phase | updating, for 1 min 1 s |",
        "| steps | 6 of 100 are complete |",
        "| error | BackendTimeoutError |",
        "| role | trainer, rank 1 of 2 |",
        "| call | update |",
        "| process | 4711 on node3 |",
        "| run directory | runs/sums |",
    ):
        assert row in page
    assert "1 h 1 min after the start" in page
    assert "A checkpoint of step 6 is in runs/sums/checkpoints." in page
    assert "chatlearn run runs/sums/config.yaml" in page
    assert "python 3.11.7, chatlearn-core 0.1.0" in page


def test_the_stack_of_the_worker_appears_once() -> None:
    page = failure_page(hang(), failure())
    assert page.count("dist.all_reduce(gradient)") == 1
    section = page[page.index("## Where it was, in the worker") :]
    assert "dist.all_reduce(gradient)" in section
    assert "update did not return within 60 s. Where it hangs stands below.\n" in page
    assert "## What caused it" not in page, "there is nothing behind it"


def chained() -> ReplicaLostError:
    """As a fleet raises it: the last death is the cause."""
    death = BackendError("replica 0, submit: the process is gone").at(WorkerPlace("generator", "replica 0", "submit"))
    try:
        raise ReplicaLostError("replica 0 died, and 2 restart(s), the limit, are used up") from death
    except ReplicaLostError as error:
        return error


def test_causes_are_listed_in_order_and_say_where_if_the_error_itself_does_not() -> None:
    page = failure_page(chained(), failure())
    assert "1. `ReplicaLostError`: replica 0 died, and 2 restart(s), the limit, are used up" in page
    assert "2. `BackendError`: replica 0, submit: the process is gone" in page
    assert "| role | generator, replica 0 |" in page


def test_errors_that_came_at_the_same_time_are_all_named() -> None:
    first = BackendError("the reward's disk is full")
    first.__cause__ = ExceptionGroup("in a TaskGroup", [first, BackendTimeoutError("replica 1 hangs")])
    first.add_note("and: rank 0 says the same")
    page = failure_page(first, failure())
    assert "1. `BackendError`: the reward's disk is full\n   - and: rank 0 says the same" in page
    assert "2. `BackendTimeoutError`: replica 1 hangs" in page
    assert page.count("the reward's disk is full") == 2, "headline and list"


def test_an_unexpected_error_has_its_traceback() -> None:
    try:
        {}["answer"]
    except KeyError as error:
        page = failure_page(error, failure())
    assert "a bug, here or in a plugin" in page
    assert "in test_an_unexpected_error_has_its_traceback" in page
    assert "KeyError: 'answer'" in page


def test_earlier_events_are_listed() -> None:
    events = (
        {"time": "2026-01-01T10:00:00+00:00", "event": "resume", "note": "resuming after step 2"},
        {"time": "2026-01-01T10:01:00+00:00", "event": "replica_rebuilt", "step": 4, "text": "replica 0\ndied | so"},
    )
    page = failure_page(hang(), failure(events=events))
    assert "- 2026-01-01T10:00:00+00:00 **resume**: note resuming after step 2" in page
    assert "- 2026-01-01T10:01:00+00:00 **replica_rebuilt** (step 4): replica 0 died \\| so" in page
    assert "Nothing out of the ordinary." in failure_page(hang(), failure())


def test_before_the_first_step_it_says_so() -> None:
    page = failure_page(TrainerLostError("rank 0 died"), failure(phase="starting", step=0, num_complete=0))
    assert page.startswith("# Run 'sums' failed while starting, before the first step\n")


@pytest.mark.parametrize("long", [BackendError("x" * 50_000), BackendError("x").at(PLACE, "line\n" * 5_000)])
def test_it_stays_one_page(long: BackendError) -> None:
    events = tuple({"time": "now", "event": "warning", "text": "y" * 5_000} for _ in range(20))
    page = failure_page(long, failure(events=events))
    assert len(page) < 15_000
    assert "characters more" in page or "lines" in page


def test_third_party_text_is_made_printable() -> None:
    page = failure_page(BackendError("reward said \x1b[31m half \ud800"), failure())
    assert "reward said \\x1b[31m half \\ud800" in page
    page.encode()


def test_the_plugin_writes_it_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "failure.md").write_text("of an earlier failure")
    plugin.chatlearn_error(BackendError("out of memory \ud800"), failure(run_dir=tmp_path))
    text = (tmp_path / "failure.md").read_text()
    assert text.startswith("# Run 'sums' failed while updating, step 7 of 100\n")
    assert "out of memory \\ud800" in text
    assert [path.name for path in tmp_path.iterdir()] == ["failure.md"]


def test_a_page_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ChatLearnError, match=r"cannot write .*failure\.md: No such file or directory\. Free space"):
        plugin.chatlearn_error(BackendError("out of memory"), failure(run_dir=tmp_path / "gone"))
