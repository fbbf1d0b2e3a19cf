"""Timers: the time that a step spends in each activity, and a trace of the roles' actions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chatlearn_core.types import Metric, Metrics


@dataclass(slots=True)
class Span:
    """One action of a role, for the trace. Times are those of ``time.perf_counter``."""

    role: str
    action: str
    start: float
    stop: float
    level: int | None = None
    """Depth of the call in the flow's graph; None for actions that are no call of the flow."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further facts, as JSON values."""
    during: str | None = None
    """The activity it was part of, if not the step itself."""


class Timers:
    """Named stopwatches of one step. A name may overlap with others and with itself; overlapping spans count once.

    Measurements with a role are also kept as the step's trace.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """The trace, in the order in which actions ended."""
        self._start = time.perf_counter()
        self._times: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def measure(
        self, name: str, *, role: str | None = None, action: str | None = None, level: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Add the wall time of the block to ``name``, even if it raises.

        Args:
            role: the acting role; if given, the block is part of the trace.
            action: name of the action; ``name`` by default.

        Yields:
            the span's facts, which the block may fill.
        """
        start = time.perf_counter()
        facts: dict[str, Any] = {}
        try:
            yield facts
        finally:
            stop = time.perf_counter()
            self._times.setdefault(name, []).append((start, stop))
            if role is not None:
                self.spans.append(Span(role, action or name, start, stop, level, facts))

    def adopt(self, other: Timers, during: str) -> None:
        """Add the trace of an activity timed separately, such as an evaluation, but not its times."""
        self.spans.extend(replace(span, during=during) for span in other.spans)

    def include(self, part: Timers) -> None:
        """Add the times and the trace of a part of the step that had its own timers, because it may have begun before
        the step or run concurrently with its other parts.
        """
        self.spans.extend(part.spans)
        for name, times in part._times.items():
            self._times.setdefault(name, []).extend(times)

    def seconds(self, name: str) -> float:
        """Wall time during which at least one block of ``name`` ran."""
        total, end = 0.0, float("-inf")
        for start, stop in sorted(self._times.get(name, [])):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    def metrics(self) -> Metrics:
        """``timing_s/<name>`` of everything measured so far."""
        return {f"timing_s/{name}": Metric(self.seconds(name), 1.0, "sum") for name in sorted(self._times)}

    def trace(self) -> list[dict[str, Any]]:
        """The trace as JSON values, by start. ``start_s`` and ``stop_s`` count from the creation of these timers, and
        are negative for earlier actions of an included part.

        Calls of one kind, such as the updates of a step, form one entry from the first to the last, with their number.
        """
        entries: list[dict[str, Any]] = []
        calls: dict[tuple[Any, ...], dict[str, Any]] = {}
        for span in sorted(self.spans, key=lambda span: (span.start, span.stop)):
            stop_s = round(span.stop - self._start, 6)
            key = (span.role, span.action, span.level, span.during)
            if not span.facts and key in calls:
                entry = calls[key]
                entry["calls"] += 1
                entry["stop_s"] = max(entry["stop_s"], stop_s)
                continue
            entry = {"role": span.role, "action": span.action, "level": span.level}
            entry |= {"start_s": round(span.start - self._start, 6), "stop_s": stop_s, **span.facts}
            if span.during is not None:
                entry["during"] = span.during
            if not span.facts:
                calls[key] = entry | {"calls": 1}
                entry = calls[key]
            entries.append(entry)
        return entries
