"""Measures how long the coroutines of a backend keep an event loop from other work."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ATTEMPTS = 6
"""Measurements, of which the least counts: a fault blocks the loop each time, a busy machine does not."""
FREE_S = 0.02
"""Length of a turn that disturbs nobody, seconds."""
_PROBE_S = 0.002


@dataclass(slots=True, frozen=True)
class Blocks:
    """How long a loop ran callbacks without a turn."""

    longest_s: float
    total_s: float
    """Sum over all turns of what each took beyond ``FREE_S``."""


class LoopWatch:
    """Makes an event loop, and measures its times without a turn while ``measuring``.

    A block is the CPU time of the loop's thread, or the time that passed less the delays that another thread of this
    process had meanwhile, by which a busy machine shows; the longer of the two counts. At most half of the time counts
    as a delay, because a block of many short sleeps is delayed as often as the other thread.
    """

    def __init__(self) -> None:
        self._probe: _Probe | None = None
        self._began: tuple[float, float, float] | None = None
        self._longest_s = self._total_s = 0.0

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop that this object watches; for ``asyncio.Runner(loop_factory=...)``."""
        return asyncio.SelectorEventLoop(_WatchedSelector(self))

    @contextmanager
    def measuring(self) -> Iterator[Callable[[], Blocks]]:
        """Measure inside the block; yields a function that returns what was measured."""
        self._probe, self._began, self._longest_s, self._total_s = _Probe(), None, 0.0, 0.0
        self._probe.start()
        try:
            yield lambda: Blocks(self._longest_s, self._total_s)
        finally:
            probe, self._probe = self._probe, None
            probe.stop()

    def turn_ends(self) -> None:
        """Called when the loop has run all callbacks that were ready."""
        if self._probe is not None and self._began is not None:
            wall, cpu, late = (now - then for now, then in zip(self._now(self._probe), self._began, strict=True))
            turn_s = max(cpu, wall - min(late, wall / 2))
            self._longest_s = max(self._longest_s, turn_s)
            self._total_s += max(0.0, turn_s - FREE_S)

    def turn_begins(self) -> None:
        """Called when the loop has found callbacks to run."""
        self._began = None if self._probe is None else self._now(self._probe)

    @staticmethod
    def _now(probe: _Probe) -> tuple[float, float, float]:
        return time.monotonic(), time.thread_time(), probe.late()


class _WatchedSelector(selectors.DefaultSelector):
    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch

    def select(self, timeout: float | None = None) -> Any:
        self._watch.turn_ends()
        found = super().select(timeout)
        self._watch.turn_begins()
        return found


class _Probe:
    """A thread that sums up how much later than asked it wakes: the part of a delay that the machine is to blame
    for.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._due = time.monotonic()
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def late(self) -> float:
        """Return the sum, with what the present sleep is late by now, seconds."""
        return self._late_s + max(0.0, time.monotonic() - self._due)

    def start(self) -> None:
        self._due = time.monotonic() + _PROBE_S
        self._thread.start()

    def stop(self) -> None:
        self._stops = True
        self._thread.join()

    def _run(self) -> None:
        while not self._stops:
            time.sleep(max(0.0, self._due - time.monotonic()))
            now = time.monotonic()
            self._late_s, self._due = self._late_s + max(0.0, now - self._due), now + _PROBE_S


def least(measure: Callable[[], float], limit_s: float) -> float:
    """Return the least of up to ``ATTEMPTS`` measurements; one below ``limit_s`` is enough."""
    found = float("inf")
    for _ in range(ATTEMPTS):
        found = min(found, measure())
        if found < limit_s:
            break
    return found


def blocks_of(work: Coroutine[Any, Any, object]) -> Blocks:
    """Run a coroutine on a loop of its own, and measure the loop."""
    watch = LoopWatch()
    with asyncio.Runner(loop_factory=watch.new_loop) as runner, watch.measuring() as blocks:
        runner.run(work)
    return blocks()
