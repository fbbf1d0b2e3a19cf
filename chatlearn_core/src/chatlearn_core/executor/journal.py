"""What a run does and what happens to it: told to who listens, written to ``events.jsonl``, kept for a failure page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.metrics import RunDirectory
from chatlearn_core.protocols import RuntimeEvent

KEPT_EVENTS = 20
"""Newest events that a failure page shows."""


class Journal:
    """The one place that phases, messages and events of a run go through.

    Args:
        directory: holds ``events.jsonl``.
        listener: a person's view: the progress bar, or a test.
    """

    def __init__(self, directory: RunDirectory, listener: RunListener) -> None:
        self.directory = directory
        self.listener = listener
        self.step = 0
        """The step that is being made; 0 before the first."""
        self.phase = Phase.STARTING
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=KEPT_EVENTS)
        """The newest events of this process, as ``events.jsonl`` has them."""
        self._entered = time.monotonic()

    @property
    def phase_s(self) -> float:
        """Seconds since the phase was entered."""
        return time.monotonic() - self._entered

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """The run does this now, in ``step`` or in the step that it is in."""
        self.step = self.step if step is None else step
        self.phase, self._entered = phase, time.monotonic()
        self.listener.phase(self.step, phase)

    def record(self, event: str, **facts: Any) -> None:
        """Write an event down."""
        self.recent.append(self.directory.append_event(event, **facts))

    def say(self, text: str, event: str | None = None, **facts: Any) -> None:
        """Something a person should read; with ``event`` it is written down too."""
        self.listener.message(text)
        if event is not None:
            self.record(event, **facts)

    def warn(self, text: str, event: str = "warning", **facts: Any) -> None:
        """Something a person should do something about; it is written down."""
        self.listener.warning(text)
        self.record(event, **{"step": self.step, **(facts or {"text": text})})

    def runtime_event(self, event: RuntimeEvent) -> None:
        """What the runtime reports while the run goes on: a worker that it rebuilt. Never raises."""
        self.listener.warning(event.text)
        try:
            self.record(event.name, step=self.step, phase=str(self.phase), text=event.text, **event.facts)
        except ChatLearnError as error:
            self.listener.warning(f"an event could not be recorded: {error}")
