"""Finds out that a hosted process does not work any more though it has not ended: stopped, or hung for good."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from chatlearn_hosting.process_group import process_fields, processes_of

SILENCE_S = 60.0
"""A process that neither answers nor works for so long is given up."""
_LOOKS = 6
"""In ``SILENCE_S``. Looks are counted, not seconds: if this process is suspended itself, the other is not to blame."""
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12
"""Fields of ``/proc/<pid>/stat`` behind the name."""
_STOPPED = "T"
_AT_WORK = frozenset("RD")
"""Runs or waits for a CPU, waits for a disk."""
_IS_DEBUGGED = "t"


class Watchdog:
    """Looks at a process group now and then, in a thread of its own.

    Given up is a group of which a process is stopped (SIGSTOP), and a leader that leaves a ping unanswered and uses no
    CPU meanwhile: code that holds the interpreter's lock for minutes, such as a compiler, is at work.

    Args:
        leader: of the group.
        ping: asks the leader for an answer, which ``heard`` is then called for.
        give_up: called once, with the reason.
        silence_s: how long a process may be stopped or silent.
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
        self._waits = False
        """For the answer to a ping."""
        self._num_missed = 0
        self._cpu_ticks = 0
        self._num_stopped: dict[int, int] = {}
        """Process -> looks in a row that found it stopped."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name} watchdog", daemon=True)
        self._thread.start()

    def expect_answers(self) -> None:
        """From now on the leader answers pings, whatever it does."""
        self._answers_pings = True

    def heard(self) -> None:
        """A ping was answered."""
        self._waits = False

    def stop(self) -> None:
        """Look no more. Twice is fine."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._silence_s / _LOOKS):
            reason = self._look()
            if reason is not None and not self._ended.is_set():
                self._give_up(reason)
                return

    def _look(self) -> str | None:
        """Why the group is given up, if it is."""
        stopped = [process for process, fields in processes_of(self._leader).items() if fields[_STATE] == _STOPPED]
        self._num_stopped = {process: self._num_stopped.get(process, 0) + 1 for process in stopped}
        for process, looks in self._num_stopped.items():
            if looks > _LOOKS:
                which = f"process {process}" if process == self._leader else f"process {process}, which it started,"
                return f"{which} has been stopped (SIGSTOP) for {self._silence_s:g} s"
        if not self._answers_pings:
            return None
        is_silent = self._waits and not self._works()
        self._num_missed = self._num_missed + 1 if is_silent else 0
        if self._num_missed > _LOOKS:
            return f"process {self._leader} neither answered nor did anything for {self._silence_s:g} s"
        if not self._waits:
            self._waits = True
            self._ping()
        return None

    def _works(self) -> bool:
        """Whether the leader used a CPU since the last look, waits for one or for a disk, or is held by a debugger."""
        fields = process_fields(Path("/proc", str(self._leader)))
        if fields is None:
            return False
        before, self._cpu_ticks = self._cpu_ticks, int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        if self._cpu_ticks > before or fields[_STATE] == _IS_DEBUGGED:
            return True
        threads = map(process_fields, Path("/proc", str(self._leader), "task").glob("*"))
        return any(thread is not None and thread[_STATE] in _AT_WORK for thread in threads)
