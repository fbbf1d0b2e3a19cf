"""How long something was busy, for idle fractions."""

from __future__ import annotations

from collections.abc import Callable


class BusyTime:
    """Measures the time during which at least one of several overlapping activities runs.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = 0
        self._since = 0.0
        self._busy_s = 0.0

    def begin(self) -> None:
        """An activity begins."""
        if not self._open:
            self._since = self._clock()
        self._open += 1

    def end(self) -> None:
        """An activity ends."""
        self._open -= 1
        if not self._open:
            self._busy_s += self._clock() - self._since

    def take(self) -> float:
        """Busy seconds since the last call."""
        now = self._clock()
        busy = self._busy_s + (now - self._since if self._open else 0.0)
        self._busy_s, self._since = 0.0, now
        return busy
