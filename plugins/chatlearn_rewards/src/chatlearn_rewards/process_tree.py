"""A process's descendants, found in ``/proc`` and ended; Linux only. Imports only the standard library."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MAX_ROUNDS = 100
"""Looks for new descendants: each round freezes those that it finds, so that a fork bomb runs out of processes."""


def descendants(root: int) -> set[int]:
    """Children of ``root``, and theirs; zombies included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):  # it ended meanwhile
                # The name in parentheses may hold anything; fixed fields follow its last parenthesis.
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    generation = {root}
    while generation := {child for child, parent in parents.items() if parent in generation} - found:
        found |= generation
    return found


def end_descendants(root: int) -> None:
    """Kill every descendant of ``root``: all are stopped first, so that none starts another meanwhile.

    Orphans of ``root`` are found where it is a subreaper (``PR_SET_CHILD_SUBREAPER``), whatever session or group they
    moved to.
    """
    stopped: set[int] = set()
    for _ in range(MAX_ROUNDS):
        new = descendants(root) - stopped
        if not new:
            break
        for process in new:
            _send(process, signal.SIGSTOP)
        stopped |= new
    for process in stopped:
        _send(process, signal.SIGKILL)


def end_marked(mark: str) -> None:
    """Kill every process that was started with an environment variable of this value, or by one that was.

    Finds what ``end_descendants`` cannot where the common ancestor was killed, but no process that cleared its
    environment.
    """
    for _ in range(MAX_ROUNDS):
        found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and _has(entry, mark)]
        if not found:
            break
        for process in found:
            _send(process, signal.SIGKILL)


def _has(entry: Path, mark: str) -> bool:
    try:
        return mark.encode() in (entry / "environ").read_bytes()  # empty of a zombie
    except OSError:  # it ended, or is another user's
        return False


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it ended, or took another user's rights
        os.kill(process, number)
