"""A guard process that outlives the driver: ends the Ray that the driver started, and reports the cause of its end.

Ray's own processes notice the driver's end after half a minute, or not at all. When Ray's node manager (the raylet) is
gone, Ray ends the driver from C++ code, so that no handler in the driver can report the cause.

The driver writes to this program's input: first a line of JSON with the processes to watch; later ``leaving`` before it
ends its Ray itself, and ``bye``, or ``end`` to have its Ray ended. This program writes ``lost`` with a message when a
watched process has ended or was stopped, which the driver answers with ``heard``; and ``ended``. It uses only the
standard library and is run by its path, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.5
HEARD_S = 10.0
"""A driver that does not answer within this many seconds that its Ray is lost hangs permanently in a call of Ray."""
PATIENCE_S = 120.0
"""Seconds in which a driver that has answered must end by itself."""
WORKERS_S = 5.0
"""Seconds for workers and their child processes to clean up after Ray is gone."""
DEATH_S = 5.0
STOPPED = "T"
_SUSPENDED = (STOPPED, "t")
"""Process states "stopped" and "stopped by a debugger"."""


class Guarded:
    """One process, held by a pidfd, so that a reused process id does no harm."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._descriptor: int | None = None
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
        self._num_stopped = 0

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when the process ends; none if it ended before."""
        return [] if self._descriptor is None else [self._descriptor]

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, even if it has not been reaped."""
        return self._descriptor is None or bool(select.select([self._descriptor], [], [], 0)[0])

    def kill(self) -> None:
        """Kill the process."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def problem(self, silence_s: float, *, may_stop: bool) -> str | None:
        """Return the problem if the process has ended or was stopped for too long; call it every ``LOOK_S``.

        Args:
            silence_s: longest time in seconds that the process may be stopped.
            may_stop: whether to ignore a stop now.
        """
        if self.has_ended:
            return f"{self.name} (process {self.pid}) has ended"
        self._num_stopped = self._num_stopped + 1 if state_of(self.pid) == STOPPED and not may_stop else 0
        if self._num_stopped * LOOK_S > silence_s:
            return f"{self.name} (process {self.pid}) has been stopped (SIGSTOP) for {silence_s:g} s"
        return None


def state_of(pid: int) -> str:
    """Return the state of a process, such as ``R``, ``S`` or ``T``; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children_of(pid: int) -> set[int]:
    """Return the child processes of a process."""
    children: set[int] = set()
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                children |= {int(child) for child in thread.read_text().split()}
    return children


def marked_processes(mark: bytes) -> set[int]:
    """Return the processes that have this entry in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # the process has ended, or belongs to another user
                is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
                if is_marked and state_of(int(entry.name)) not in ("", "Z", "X"):
                    found.add(int(entry.name))
    return found


class Guard:
    """Watches the driver's Ray, and ends it.

    Args:
        facts: ``watched``: name -> process; ``owned``: processes of a Ray that the driver started; ``raylet``: the one
            of them that starts others; ``worker_mark``: an entry in the environment of its workers and their children;
            ``driver``; ``silence_s``; ``sentence``: message about a lost Ray, with a placeholder ``{reason}``;
                ``page``:
            file for the message if the driver cannot write it.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        # The raylet first: its end also ends the driver and the rest of Ray, so it is the cause if all have ended.
        watched = sorted(facts["watched"].items(), key=lambda item: "raylet" not in item[0])
        self._watched = [Guarded(name, pid) for name, pid in watched]
        self._owned = [Guarded("", pid) for pid in facts["owned"]]
        self._raylet: int | None = facts["raylet"] if self._owned else None
        self._children: dict[int, Guarded] = {}
        """Children of the raylet: agents and workers. After its end they can no longer be found."""
        self._worker_mark: bytes = facts["worker_mark"].encode()
        self._driver = Guarded("the driver", facts["driver"])
        self._silence_s: float = facts["silence_s"]
        self._sentence: str = facts["sentence"]
        self._page = Path(facts["page"])
        self._lost: str | None = None
        self._deadline = 0.0
        """Time by which the driver must have ended, once Ray is lost."""

    def run(self) -> None:
        """Watch until the driver says ``bye`` or is gone."""
        unread = b""
        while True:
            ends = [] if self._lost is not None else [d for process in self._watched for d in process.descriptors]
            readable = select.select([sys.stdin.fileno(), *ends], [], [], LOOK_S)[0]
            if sys.stdin.fileno() not in readable:
                if self._driver.has_ended:  # a process it forked holds its end of the pipe open
                    self._driver_is_gone()
                    return
                self._look()
                continue
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                self._driver_is_gone()
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                if line == b"bye":
                    return
                if line == b"leaving":
                    self._watched = []
                elif line == b"heard":
                    self._deadline = time.monotonic() + PATIENCE_S
                else:
                    assert line == b"end", line
                    self._end_ray()
                    _say({"ended": True})

    def _look(self) -> None:
        if self._raylet is not None:
            children = children_of(self._raylet) - self._children.keys()
            kept = {pid: child for pid, child in self._children.items() if not child.has_ended}
            self._children = kept | {pid: Guarded("", pid) for pid in children}
        is_suspended = state_of(self._driver.pid) in _SUSPENDED
        if is_suspended:  # by Ctrl-Z, together with its Ray: it can neither answer nor end
            self._deadline = max(self._deadline, time.monotonic() + HEARD_S)
        if self._lost is None:
            problems = (process.problem(self._silence_s, may_stop=is_suspended) for process in self._watched)
            reason = next(filter(None, problems), None)
            if reason is not None:
                self._lost, self._deadline = self._sentence.replace("{reason}", reason), time.monotonic() + HEARD_S
                _say({"lost": self._lost})
        elif time.monotonic() > self._deadline:
            self._report_for_driver()
            self._driver.kill()

    def _driver_is_gone(self) -> None:
        if self._lost is None:  # Ray may have ended the driver before the next check
            ended = [process for process in self._watched if process.has_ended]
            if ended and not self._owned:
                self._lost = self._sentence.replace("{reason}", f"{ended[0].name} (process {ended[0].pid}) has ended")
        if self._lost is not None:
            self._report_for_driver()
        self._end_ray()

    def _report_for_driver(self) -> None:
        """Report the loss of Ray in place of the driver."""
        if self._page.parent.is_dir() and not self._page.exists():
            print(self._lost, file=sys.stderr, flush=True)
            with suppress(OSError):
                self._page.write_text(f"# The run was ended with its Ray\n\n{self._lost}\n", encoding="utf-8")

    def _end_ray(self) -> None:
        """End the driver's Ray, and the processes that Ray started."""
        if not self._owned:
            return
        for process in self._owned:
            process.kill()
        workers = marked_processes(self._worker_mark)
        for pid, child in self._children.items():
            if pid not in workers:  # an agent, which checks for its raylet only every half minute
                child.kill()
        deadline = time.monotonic() + WORKERS_S
        while time.monotonic() < deadline + DEATH_S and (left := marked_processes(self._worker_mark)):
            for pid in left:
                if time.monotonic() > deadline or state_of(pid) == STOPPED:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _say(message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the driver is gone; reading its pipe will report it
        print(json.dumps(message), flush=True)


def main() -> None:
    """Run the guard."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver gets these signals too and decides
    os.setsid()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as unbuffered:
        line = unbuffered.readline()
    if line:
        Guard(json.loads(line)).run()


if __name__ == "__main__":
    main()
