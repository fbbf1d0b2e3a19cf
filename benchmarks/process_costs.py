"""CPU time and memory of this process and of those that it started, from ``/proc``."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NANOSECONDS = 1e-9


def descendants() -> list[int]:
    """Processes that this one started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


class Costs:
    """What was used since it was made.

    Args:
        alone: of this process alone; else with those that it has started by then.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._others = [] if alone else descendants()
        for process in (os.getpid(), *self._others):
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")  # forget the peak of the resident set
        self._memory_kb = self._sum("VmRSS")
        self._others_cpu_s = self._scheduled_s()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Wall time."""
        return time.perf_counter() - self._start

    def cpu_s(self) -> float:
        """CPU seconds of all of them together."""
        return time.process_time() - self._cpu_start + self._scheduled_s() - self._others_cpu_s

    def peak_mb(self) -> float:
        """How far the resident sets rose, summed; memory that is shared counts in every process that maps it."""
        return (self._sum("VmHWM") - self._memory_kb) / 1024

    def _sum(self, key: str) -> int:
        total = 0
        for process in (os.getpid(), *self._others):
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith(key))
        return total

    def _scheduled_s(self) -> float:
        """CPU time of the others' threads; a process's own clock ticks too slowly."""
        total = 0
        for process in self._others:
            with suppress(OSError):
                for task in Path(f"/proc/{process}/task").iterdir():
                    total += int((task / "schedstat").read_text().split()[0])
        return total * NANOSECONDS
