"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from chatlearn_core.types import Metric, Metrics


class Timers:
    """Named stopwatches of one step. A name may overlap with others and with itself; overlapping spans count once."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to ``name``, also if it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((start, time.perf_counter()))

    def seconds(self, name: str) -> float:
        """Wall time during which at least one block of ``name`` ran."""
        total, end = 0.0, float("-inf")
        for start, stop in sorted(self._spans.get(name, [])):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    def metrics(self) -> Metrics:
        """``timing_s/<name>`` of everything measured so far."""
        return {f"timing_s/{name}": Metric(self.seconds(name), 1.0, "sum") for name in sorted(self._spans)}
