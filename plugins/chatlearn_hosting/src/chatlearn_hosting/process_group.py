"""Ends a process with everything it started, and removes the shared memory files that these processes leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from chatlearn_hosting.engine_side.shared_files import mapped_files, remove

_POLL_S = 0.05
_DEATH_S = 5.0
"""Time in seconds for a killed process to disappear, because its memory has to be freed."""


def live_members(leader: int) -> list[int]:
    """Return the processes in the group or session that ``leader`` leads, without zombies."""
    return list(processes_of(leader))


def processes_of(leader: int) -> dict[int, list[str]]:
    """Return the processes in the group or session of ``leader``, each with its ``process_fields``, without zombies."""
    members = {}
    for process in all_processes():
        fields = process_fields(Path("/proc", str(process)))
        if fields is None:
            continue  # it has ended in the meantime
        state, _, group, session = fields[:4]
        if state not in ("Z", "X") and leader in (int(group), int(session)):
            members[process] = fields
    return members


def process_fields(entry: Path) -> list[str] | None:
    """Return the fields after the name in ``stat`` of a process or thread, the state first; None if it has ended."""
    try:
        # The name in parentheses may hold anything; fixed fields follow its last parenthesis.
        return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def all_processes() -> list[int]:
    """Return every visible process id."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def end_group(leader: int, grace_s: float, shared_files: Iterable[str] = ()) -> None:
    """Send SIGTERM to every process of a group, and kill those that still run after ``grace_s``.

    Unlinks the shared memory files that they have mapped, except files that other processes map too.

    Args:
        leader: process id of the leader, not yet reaped, so that the id cannot be reused.
        grace_s: seconds between SIGTERM and SIGKILL.
        shared_files: files that members had mapped earlier.
    """
    members = live_members(leader)
    files = set(shared_files) | mapped_files(members)
    if _signal_all(members, signal.SIGTERM) and not _all_gone(leader, grace_s):
        _signal_all(live_members(leader), signal.SIGKILL)
        _all_gone(leader, _DEATH_S)
    if files:
        remove(files, spare=all_processes())


def _signal_all(processes: list[int], number: signal.Signals) -> bool:
    """Signal processes. Returns whether there were any."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
    return bool(processes)


def _all_gone(leader: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while live_members(leader):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
