"""``timeline.jsonl``: when the trainer waited, updated and synced weights, and when each replica sampled."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

FILE = "timeline.jsonl"

Interval = tuple[float, float]
"""Start and stop, seconds."""


class Timeline:
    """Appends a line to the file of a run at the end of each weight sync.

    The line of a step covers the time since the line before it, and is an object of these values:
    ``step``; ``time``, its start, seconds since 1970 (UTC); ``seconds``, its duration; ``waiting``, ``updating`` and
    ``syncing``, intervals of the trainer; ``generators``, for each role a list of intervals for each replica. Intervals
    are ``[start, stop]`` in seconds after ``time``. In the rest of the time, the trainer evaluated or wrote a
    checkpoint. A step that is made again, because the run resumed, has another line; the last one counts.

    Args:
        file: where lines are appended; None: nowhere.
        clock: returns seconds.
        wall_clock: returns seconds since 1970 (UTC).
    """

    def __init__(
        self,
        file: Path | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._clock = clock
        self._wall_clock = wall_clock
        self._busy_since: dict[tuple[str, int], float] = {}
        """Role and replica with open requests -> when they began to sample."""
        self._is_paused = False
        self._num_replicas: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget the time up to now: nothing was made in it that counts."""
        self._start, self._time = self._clock(), self._wall_clock()
        self._waiting: list[Interval] = []
        self._updating: Interval = (self._start, self._start)
        self._sync_began: float | None = None
        self._sampling: dict[tuple[str, int], list[Interval]] = {}
        self._busy_since = dict.fromkeys(self._busy_since, self._start)

    def opened(self, role: str, replica: int, num_open: int) -> None:
        """A replica has another number of open requests; see ``Rollouts.on_open``."""
        key, now = (role, replica), self._clock()
        self._num_replicas[role] = max(self._num_replicas.get(role, 0), replica + 1)
        if num_open:
            self._busy_since.setdefault(key, now)
        elif (since := self._busy_since.pop(key, None)) is not None:
            self._add(key, since, now)

    def waited(self, began: float) -> None:
        """The trainer has waited for rollouts since ``began``."""
        self._waiting.append((began, self._clock()))

    def updates_end(self) -> None:
        """The trainer has made the updates of the step, since it last waited."""
        self._updating = (max((stop for _, stop in self._waiting), default=self._start), self._clock())

    def sync_begins(self, pauses: bool) -> None:
        """A weight sync begins, in which replicas with open requests sample nothing if it ``pauses`` them."""
        self._sync_began = self._clock()
        self._is_paused = pauses
        if pauses:
            for key, since in self._busy_since.items():
                self._add(key, since, self._sync_began)

    def sync_ends(self, step: int) -> None:
        """Every replica serves the new weights: append the line of the step."""
        now, began = self._clock(), self._sync_began
        assert began is not None, "a sync that ends has begun"
        for key, since in self._busy_since.items():
            if not self._is_paused:
                self._add(key, since, now)
        self._is_paused = False
        generators = {
            role: [self._relative(self._sampling.get((role, replica), [])) for replica in range(count)]
            for role, count in sorted(self._num_replicas.items())
        }
        line = {
            "step": step,
            "time": round(self._time, 3),
            "seconds": round(now - self._start, 6),
            "waiting": self._relative(self._waiting),
            "updating": self._relative([self._updating]),
            "syncing": self._relative([(began, now)]),
            "generators": generators,
        }
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        self.restart()

    def _add(self, key: tuple[str, int], start: float, stop: float) -> None:
        if self._is_paused and self._sync_began is not None:
            stop = min(stop, self._sync_began)
        if stop > max(start, self._start):
            self._sampling.setdefault(key, []).append((max(start, self._start), stop))

    def _relative(self, intervals: list[Interval]) -> list[list[float]]:
        """Intervals after the start of the line; those that touch as one."""
        joined: list[list[float]] = []
        for start, stop in sorted((round(a - self._start, 6), round(b - self._start, 6)) for a, b in intervals):
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            elif stop > start:
                joined.append([start, stop])
        return joined
