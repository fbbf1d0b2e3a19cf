"""Phases, messages and events of a run: sent to listeners, written to ``events.jsonl``, kept for a failure page."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.metrics import RunDirectory
from chatlearn_core.protocols import RuntimeEvent

KEPT_EVENTS = 20
"""Number of latest events shown on a failure page."""


class Journal:
    """The single place that records phases, messages and events of a run.

    Args:
        directory: holds ``events.jsonl``.
        listener: shows progress to a user (the progress bar), or to a test.
    """

    def __init__(self, directory: RunDirectory, listener: RunListener) -> None:
        self.directory = directory
        self.listener = listener
        self.step = 0
        """The step in progress; 0 before the first."""
        self._active: dict[Phase, list[float]] = {}
        """Phase -> start times of its running parts; the phase that began last comes last."""
        self._last = (Phase.STARTING, time.monotonic())
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=KEPT_EVENTS)
        """The latest events of this process, as written to ``events.jsonl``."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases in progress, in the order in which they began; after an error, those in progress then."""
        return tuple(self._active)

    @property
    def phase(self) -> Phase:
        """The phase that began last."""
        return next(reversed(self._active), self._last[0])

    def seconds_in(self, phase: Phase) -> float:
        """Since the phase began."""
        began = self._active.get(phase)
        return time.monotonic() - (min(began) if began else self._last[1])

    @contextlib.contextmanager
    def during(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """The run is in this phase during the block, for ``step`` or the current step; phases may overlap.

        If the block raises, its phase stays recorded, so that a failure can name it; see ``forget``.
        """
        self.step = self.step if step is None else step
        began = time.monotonic()
        self._last = (phase, began)
        is_new = phase not in self._active
        self._active.setdefault(phase, []).append(began)
        if is_new:
            self.listener.phase(self.step, phase)
            self.listener.phases_changed(self.step, self.phases)
        yield
        parts = self._active.get(phase, [])
        if began in parts:
            parts.remove(began)
        if not parts and self._active.pop(phase, None) is not None:
            self.listener.phases_changed(self.step, self.phases)

    def forget(self) -> None:
        """Clear the recorded phases after an error was reported."""
        self._active.clear()

    def record(self, event: str, **facts: Any) -> None:
        """Write an event down."""
        self.recent.append(self.directory.append_event(event, **facts))

    def say(self, text: str, event: str | None = None, **facts: Any) -> None:
        """Show a message to the user; with ``event`` also write it to ``events.jsonl``."""
        self.listener.message(text)
        if event is not None:
            self.record(event, **facts)

    def warn(self, text: str, event: str = "warning", **facts: Any) -> None:
        """Show a warning that calls for action, and write it to ``events.jsonl``."""
        self.listener.warning(text)
        self.record(event, **{"step": self.step, **(facts or {"text": text})})

    def runtime_event(self, event: RuntimeEvent) -> None:
        """Record an event that the runtime reports, such as a rebuilt worker. Never raises."""
        self.listener.warning(event.text)
        try:
            self.record(event.name, step=self.step, phase=str(self.phase), text=event.text, **event.facts)
        except ChatLearnError as error:
            self.listener.warning(f"an event could not be recorded: {error}")
