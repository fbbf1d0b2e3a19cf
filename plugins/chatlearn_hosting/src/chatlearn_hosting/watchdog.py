"""Detects a hosted process that has not ended but no longer works: it is stopped, or hangs permanently."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from chatlearn_hosting.process_group import process_fields, processes_of

SILENCE_S = 60.0
"""Seconds without answer and CPU use after which a process counts as hung."""
_CHECKS = 6
"""Checks in ``SILENCE_S``. Counting checks instead of seconds avoids blaming the child while this process
is suspended."""
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Indices of the fields after the name in ``/proc/<pid>/stat``."""
_STOPPED = "T"
_WORKING_STATES = frozenset("RD")
"""Running or waiting for a CPU, or waiting for a disk."""
_IS_DEBUGGED = "t"


class Watchdog:
    """Checks a process group periodically, in its own thread.

    It gives up a group when one of its processes is stopped (SIGSTOP), or when its leader leaves a ping unanswered and
    uses no CPU meanwhile. Code that holds the interpreter's lock for minutes, such as a compiler, counts as working.

    Args:
        name: name for the thread.
        leader: process id of the group's leader.
        ping: requests an answer from the leader; the answer calls ``heard``.
        give_up: called once, with the reason.
        silence_s: seconds for which a process may be stopped or silent.
    """

    def __init__(
        self,
        name: str,
        leader: int,
        *,
        ping: Callable[[], None],
        give_up: Callable[[str], None],
        silence_s: float,
    ) -> None:
        self._leader = leader
        self._ping = ping
        self._give_up = give_up
        self._silence_s = silence_s
        self._answers_pings = False
        self._awaits_answer = False
        """Whether a ping is unanswered."""
        self._num_missed = 0
        self._cpu_ticks = 0
        self._num_stopped: dict[int, int] = {}
        """Process id -> number of consecutive checks that found it stopped."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} watchdog", daemon=True)
        self._thread.start()

    def expect_answers(self) -> None:
        """Expect the leader to answer pings from now on."""
        self._answers_pings = True

    def heard(self) -> None:
        """Record that a ping was answered."""
        self._awaits_answer = False

    def stop(self) -> None:
        """Stop checking. A repeated call does nothing."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._silence_s / _CHECKS):
            reason = self._check()
            if reason is not None and not self._ended.is_set():
                self._give_up(reason)
                return

    def _check(self) -> str | None:
        """Check once. Returns why the group is given up, or None."""
        stopped = [process for process, fields in processes_of(self._leader).items() if fields[_STATE] == _STOPPED]
        self._num_stopped = {process: self._num_stopped.get(process, 0) + 1 for process in stopped}
        for process, looks in self._num_stopped.items():
            if looks > _CHECKS:
                which = f"process {process}" if process == self._leader else f"process {process}, which it started,"
                return f"{which} has been stopped (SIGSTOP) for {self._silence_s:g} s"
        if not self._answers_pings:
            return None
        is_silent = self._awaits_answer and not self._works()
        self._num_missed = self._num_missed + 1 if is_silent else 0
        if self._num_missed > _CHECKS:
            return f"process {self._leader} neither answered nor used a CPU for {self._silence_s:g} s"
        if not self._awaits_answer:
            self._awaits_answer = True
            self._ping()
        return None

    def _works(self) -> bool:
        """Whether the leader used a CPU since the last check, waits for one or for a disk, or is held by a debugger."""
        fields = process_fields(Path("/proc", str(self._leader)))
        if fields is None:
            return False
        before, self._cpu_ticks = self._cpu_ticks, int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        if self._cpu_ticks > before or fields[_STATE] == _IS_DEBUGGED:
            return True
        threads = map(process_fields, Path("/proc", str(self._leader), "task").glob("*"))
        return any(thread is not None and thread[_STATE] in _WORKING_STATES for thread in threads)
