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
        self._is_paused = False

    def begin(self) -> None:
        """An activity begins."""
        if not self._runs:
            self._since = self._clock()
        self._open += 1

    def end(self) -> None:
        """An activity ends."""
        was_running = self._runs
        self._open -= 1
        if was_running and not self._open:
            self._busy_s += self._clock() - self._since

    def pause(self) -> None:
        """Nothing runs until ``go_on``, although activities are open."""
        if self._runs:
            self._busy_s += self._clock() - self._since
        self._is_paused = True

    def go_on(self) -> None:
        """Open activities run again."""
        self._since, self._is_paused = self._clock(), False

    def take(self) -> float:
        """Busy seconds since the last call."""
        now = self._clock()
        busy = self._busy_s + (now - self._since if self._runs else 0.0)
        self._busy_s, self._since = 0.0, now
        return busy

    @property
    def _runs(self) -> bool:
        return self._open > 0 and not self._is_paused
