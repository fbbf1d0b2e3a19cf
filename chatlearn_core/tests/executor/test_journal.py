"""Phases, messages and events: told to who listens, written down, and the newest kept."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.journal import KEPT_EVENTS, Journal
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.metrics import RunDirectory
from chatlearn_core.protocols import RuntimeEvent

REBUILT = RuntimeEvent("replica_rebuilt", "replica 0 died and is rebuilt", {"role": "generator", "restart": 1})


class Listener(RunListener):
    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.seen: list[tuple[str, ...]] = []

    def phase(self, step: int, phase: Phase) -> None:
        self.told.append((step, phase))

    def phases_changed(self, step: int, phases: Sequence[Phase]) -> None:
        self.seen.append(tuple(map(str, phases)))

    def message(self, text: str) -> None:
        self.told.append(("message", text))

    def warning(self, text: str) -> None:
        self.told.append(("warning", text))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(RunDirectory(tmp_path), Listener())


def told(journal: Journal) -> list[tuple[Any, ...]]:
    assert isinstance(journal.listener, Listener)
    return journal.listener.told


def events(journal: Journal) -> list[dict[str, Any]]:
    file = journal.directory.path / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def untimed(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "time"}


def test_a_phase_is_told_with_its_step_which_stays(journal: Journal) -> None:
    with journal.during(Phase.GENERATING, 3), journal.during(Phase.SCORING):
        assert (journal.step, journal.phase) == (3, Phase.SCORING)
    assert told(journal) == [(3, "generating"), (3, "scoring")]
    assert (journal.step, journal.phase, journal.phases) == (3, Phase.SCORING, ()), "it is what the run did last"


def test_phases_overlap(journal: Journal) -> None:
    """Production goes on while updates are made: each phase lasts from its first part to its last."""
    assert isinstance(journal.listener, Listener)
    production = contextlib.ExitStack()
    production.enter_context(journal.during(Phase.GENERATING, 3))
    with journal.during(Phase.UPDATING, 3):
        with journal.during(Phase.GENERATING):
            assert journal.phases == (Phase.GENERATING, Phase.UPDATING)
        assert journal.phases == (Phase.GENERATING, Phase.UPDATING), "another part of it still runs"
        production.close()
        assert journal.phases == (Phase.UPDATING,)
    assert told(journal) == [(3, "generating"), (3, "updating")], "one that runs already does not begin"
    assert journal.listener.seen == [("generating",), ("generating", "updating"), ("updating",), ()]


def test_after_an_error_the_phases_are_those_that_it_ended(journal: Journal) -> None:
    with pytest.raises(ValueError, match="odd"), journal.during(Phase.GENERATING, 1), journal.during(Phase.SCORING):
        raise ValueError("odd")
    assert journal.phases == (Phase.GENERATING, Phase.SCORING)
    assert journal.seconds_in(Phase.GENERATING) >= journal.seconds_in(Phase.SCORING)
    journal.forget()
    assert journal.phases == ()


def test_a_warning_is_told_and_written_down(journal: Journal) -> None:
    with journal.during(Phase.UPDATING, 2):
        journal.warn("rewards are equal")
        journal.warn("rank 1 died", "trainer_lost", step=1, error="rank 1")
    assert told(journal)[1:] == [("warning", "rewards are equal"), ("warning", "rank 1 died")]
    first, second = events(journal)
    assert untimed(first) == {"event": "warning", "step": 2, "text": "rewards are equal"}
    assert untimed(second) == {"event": "trainer_lost", "step": 1, "error": "rank 1"}


def test_a_message_is_written_down_if_it_is_an_event(journal: Journal) -> None:
    journal.say("good morning")
    journal.say("going on", "resume", note="after step 2")
    assert told(journal) == [("message", "good morning"), ("message", "going on")]
    assert [untimed(event) for event in events(journal)] == [{"event": "resume", "note": "after step 2"}]


def test_what_the_runtime_did_is_a_warning_with_its_phase(journal: Journal) -> None:
    with journal.during(Phase.SYNCING, 5):
        journal.runtime_event(REBUILT)
    assert told(journal)[-1] == ("warning", REBUILT.text)
    assert untimed(events(journal)[0]) == {
        "event": "replica_rebuilt",
        "step": 5,
        "phase": "syncing",
        "text": REBUILT.text,
        "role": "generator",
        "restart": 1,
    }


def test_a_runtimes_event_does_no_harm_where_it_cannot_be_written(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(event: str, **facts: Any) -> None:
        raise ChatLearnError("cannot write events.jsonl: no space")

    monkeypatch.setattr(journal.directory, "append_event", full)
    journal.runtime_event(REBUILT)
    assert "could not be recorded: cannot write events.jsonl" in told(journal)[-1][1]


def test_the_newest_events_are_kept(journal: Journal) -> None:
    for number in range(KEPT_EVENTS + 5):
        journal.record("warning", number=number)
    assert [event["number"] for event in journal.recent] == list(range(5, KEPT_EVENTS + 5))
    assert all(event["time"].endswith("+00:00") for event in journal.recent)
