"""What a run does and what happens to it: told to who listens, written to ``events.jsonl``, kept for a failure page."""

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
        self._active: dict[Phase, list[float]] = {}
        """Phase -> when each of its parts that still run began; the phase that began last is the last."""
        self._last = (Phase.STARTING, time.monotonic())
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=KEPT_EVENTS)
        """The newest events of this process, as ``events.jsonl`` has them."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All that the run does now, in the order in which it began. After an error: what it did then."""
        return tuple(self._active)

    @property
    def phase(self) -> Phase:
        """What it began last."""
        return next(reversed(self._active), self._last[0])

    def seconds_in(self, phase: Phase) -> float:
        """Since the phase began."""
        began = self._active.get(phase)
        return time.monotonic() - (min(began) if began else self._last[1])

    @contextlib.contextmanager
    def during(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """The run does this in the block, in ``step`` or in the step that it is in, whatever else it does meanwhile.

        A block that raises leaves its phase behind, so that a failure can say in what it happened; see ``forget``.
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
        """What was under way is over, though it did not end well."""
        self._active.clear()

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
