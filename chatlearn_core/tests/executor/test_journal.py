"""Phases, messages and events: told to who listens, written down, and the newest kept."""

from __future__ import annotations

import json
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

    def phase(self, step: int, phase: Phase) -> None:
        self.told.append((step, phase))

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
    journal.enter(Phase.GENERATING, 3)
    journal.enter(Phase.SCORING)
    assert told(journal) == [(3, "generating"), (3, "scoring")]
    assert (journal.step, journal.phase) == (3, Phase.SCORING)


def test_a_warning_is_told_and_written_down(journal: Journal) -> None:
    journal.enter(Phase.UPDATING, 2)
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
    journal.enter(Phase.SYNCING, 5)
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
