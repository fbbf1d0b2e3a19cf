"""A process beside the driver that outlives it: ends the Ray that the driver started, and says what ended the driver.

Ray's own processes notice the end of the driver after half a minute, or not at all; and where Ray's node manager (the
raylet) is gone, Ray ends the driver from C++ code, so that no handler there can say why.

The driver writes to this program's input: a line of JSON with what to watch; later ``leaving`` before it ends its Ray
itself, and ``bye``, or ``end`` to have its Ray ended. This program writes ``lost`` with a sentence when a watched
process has ended or been stopped, which the driver answers with ``heard``, and ``ended``. Standard library only, run by
its path: it starts in milliseconds.
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
"""A driver that does not even hear in this time that its Ray is lost hangs in a call of Ray's, and for good."""
PATIENCE_S = 120.0
"""One that heard has so long to end by itself."""
WORKERS_S = 5.0
"""What workers and what they started get to clean up once Ray is gone."""
DEATH_S = 5.0
STOPPED = "T"
_SUSPENDED = (STOPPED, "t")
"""Also by a debugger."""


class Guarded:
    """One process by a descriptor that is only its own, whatever becomes of its number."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self._descriptor: int | None = None
        with suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)
        self._num_stopped = 0

    @property
    def descriptors(self) -> list[int]:
        """What can be read from once it has ended; none if it had before."""
        return [] if self._descriptor is None else [self._descriptor]

    @property
    def has_ended(self) -> bool:
        """Also before anything has waited for it."""
        return self._descriptor is None or bool(select.select([self._descriptor], [], [], 0)[0])

    def kill(self) -> None:
        """End it now."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def problem(self, silence_s: float, *, may_stop: bool) -> str | None:
        """What is wrong with it, if it has ended or been stopped for so long; asked every ``LOOK_S``.

        Args:
            silence_s: how long it may be stopped.
            may_stop: whether the time now does not count.
        """
        if self.has_ended:
            return f"{self.name} (process {self.pid}) has ended"
        self._num_stopped = self._num_stopped + 1 if state_of(self.pid) == STOPPED and not may_stop else 0
        if self._num_stopped * LOOK_S > silence_s:
            return f"{self.name} (process {self.pid}) has been stopped (SIGSTOP) for {silence_s:g} s"
        return None


def state_of(pid: int) -> str:
    """``R``, ``S``, ``T`` and so on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children_of(pid: int) -> set[int]:
    """Processes that one has started, and that have not left it."""
    children: set[int] = set()
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # the thread has ended
                children |= {int(child) for child in thread.read_text().split()}
    return children


def marked_processes(mark: bytes) -> set[int]:
    """Processes in whose environment this entry is."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is not ours to look at
                is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
                if is_marked and state_of(int(entry.name)) not in ("", "Z", "X"):
                    found.add(int(entry.name))
    return found


class Guard:
    """Watches, and ends.

    Args:
        facts: ``watched``: name -> process; ``owned``: processes of a Ray that the driver started; ``raylet``: that
            among them which starts others; ``worker_mark``: an entry in the environment of its workers and what they
            start; ``driver``; ``silence_s``; ``sentence``: what a lost Ray means, with ``{reason}`` in it; ``page``:
            where it is written if the driver cannot.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        # The raylet first: its end ends the driver and with it the rest of Ray, so it is the cause where all ended.
        watched = sorted(facts["watched"].items(), key=lambda item: "raylet" not in item[0])
        self._watched = [Guarded(name, pid) for name, pid in watched]
        self._owned = [Guarded("", pid) for pid in facts["owned"]]
        self._raylet: int | None = facts["raylet"] if self._owned else None
        self._children: dict[int, Guarded] = {}
        """Of the raylet: agents and workers. Once it is gone nothing tells whose they were."""
        self._worker_mark: bytes = facts["worker_mark"].encode()
        self._driver = Guarded("the driver", facts["driver"])
        self._silence_s: float = facts["silence_s"]
        self._sentence: str = facts["sentence"]
        self._page = Path(facts["page"])
        self._lost: str | None = None
        self._deadline = 0.0
        """Of the driver, once Ray is lost."""

    def run(self) -> None:
        """Until the driver says goodbye or is gone."""
        unread = b""
        while True:
            ends = [] if self._lost is not None else [d for process in self._watched for d in process.descriptors]
            readable = select.select([sys.stdin.fileno(), *ends], [], [], LOOK_S)[0]
            if sys.stdin.fileno() not in readable:
                if self._driver.has_ended:  # something it forked holds its end of the pipe open
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
        if is_suspended:  # by Ctrl-Z, and its Ray with it: it hears nothing, and cannot end either
            self._deadline = max(self._deadline, time.monotonic() + HEARD_S)
        if self._lost is None:
            problems = (process.problem(self._silence_s, may_stop=is_suspended) for process in self._watched)
            reason = next(filter(None, problems), None)
            if reason is not None:
                self._lost, self._deadline = self._sentence.replace("{reason}", reason), time.monotonic() + HEARD_S
                _say({"lost": self._lost})
        elif time.monotonic() > self._deadline:
            self._say_instead()
            self._driver.kill()

    def _driver_is_gone(self) -> None:
        if self._lost is None:  # Ray may have ended the driver faster than the next look
            ended = [process for process in self._watched if process.has_ended]
            if ended and not self._owned:
                self._lost = self._sentence.replace("{reason}", f"{ended[0].name} (process {ended[0].pid}) has ended")
        if self._lost is not None:
            self._say_instead()
        self._end_ray()

    def _say_instead(self) -> None:
        """What the driver could not say any more."""
        if self._page.parent.is_dir() and not self._page.exists():
            print(self._lost, file=sys.stderr, flush=True)
            with suppress(OSError):
                self._page.write_text(f"# The run was ended with its Ray\n\n{self._lost}\n", encoding="utf-8")

    def _end_ray(self) -> None:
        """End what the driver started of Ray, and what that started."""
        if not self._owned:
            return
        for process in self._owned:
            process.kill()
        workers = marked_processes(self._worker_mark)
        for pid, child in self._children.items():
            if pid not in workers:  # an agent, which looks for its raylet every half a minute
                child.kill()
        deadline = time.monotonic() + WORKERS_S
        while time.monotonic() < deadline + DEATH_S and (left := marked_processes(self._worker_mark)):
            for pid in left:
                if time.monotonic() > deadline or state_of(pid) == STOPPED:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def _say(message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the driver is gone, which the input tells
        print(json.dumps(message), flush=True)


def main() -> None:
    """The program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver gets them too, and what it does then counts
    os.setsid()
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as unbuffered:
        line = unbuffered.readline()
    if line:
        Guard(json.loads(line)).run()


if __name__ == "__main__":
    main()
