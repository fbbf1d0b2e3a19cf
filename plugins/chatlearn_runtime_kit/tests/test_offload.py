"""A move is reported from what the backend measures when it is done."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from chatlearn_core.protocols import MemoryEvent, MemoryPart
from chatlearn_runtime_kit.offload import move


class Unmeasured:
    def setup(self) -> None: ...

    def health(self) -> None: ...

    def close(self) -> None: ...

    def __init__(self) -> None:
        self.live: dict[MemoryPart, int] = {"weights": 8, "optimizer": 16}

    def offload(self, parts: Collection[MemoryPart]) -> None:
        self.live |= dict.fromkeys(parts, 0)

    def onload(self, parts: Collection[MemoryPart]) -> None:
        self.live |= dict.fromkeys(parts, 8)


class Measured(Unmeasured):
    def live_bytes(self, part: MemoryPart) -> int:
        return self.live[part]


class InName(Measured):
    def offload(self, parts: Collection[MemoryPart]) -> None: ...


def told(backend: Any, *parts: MemoryPart) -> list[MemoryEvent]:
    return move(backend, "offload", parts, role="trainer", worker=3)


def test_an_event_a_part_holds_what_is_live_afterwards() -> None:
    assert told(Measured(), "optimizer", "weights") == [
        MemoryEvent("trainer", 3, "offload", "weights", 0),
        MemoryEvent("trainer", 3, "offload", "optimizer", 0),
    ]


def test_a_backend_that_does_nothing_is_seen_through() -> None:
    assert [event.live_bytes for event in told(InName(), "weights", "optimizer")] == [8, 16]


def test_what_cannot_be_measured_is_not_made_up() -> None:
    assert [event.live_bytes for event in told(Unmeasured(), "weights")] == [None]
