"""Ending a process together with everything it started and what that left in shared memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from chatlearn_hosting.engine_side.shared_files import mapped_files, remove

_LOOK_S = 0.05
_DEATH_S = 5.0
"""How long a process that was killed may take to disappear: its memory has to be freed."""


def live_members(leader: int) -> list[int]:
    """Processes in the group or the session that ``leader`` leads, zombies left out."""
    return list(processes_of(leader))


def processes_of(leader: int) -> dict[int, list[str]]:
    """The same with what ``process_fields`` says of each."""
    members = {}
    for process in all_processes():
        fields = process_fields(Path("/proc", str(process)))
        if fields is None:
            continue  # it ended while we looked
        state, _, group, session = fields[:4]
        if state not in ("Z", "X") and leader in (int(group), int(session)):
            members[process] = fields
    return members


def process_fields(entry: Path) -> list[str] | None:
    """What follows the name in ``stat`` of a process or thread, its state first; None if it has ended."""
    try:
        # The name in parentheses may hold anything; fixed fields follow its last parenthesis.
        return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def all_processes() -> list[int]:
    """Every process id that this one can see."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def end_group(leader: int, grace_s: float, shared_files: Iterable[str] = ()) -> None:
    """Ask every process of a group to end, and kill those that still run after ``grace_s``.

    What they have mapped of shared memory loses its name, except what others map too.

    Args:
        leader: must not have been waited for: until then its id cannot belong to anybody else.
        grace_s: between asking and killing.
        shared_files: what members had mapped before.
    """
    members = live_members(leader)
    files = set(shared_files) | mapped_files(members)
    if _signal_all(members, signal.SIGTERM) and not _all_gone(leader, grace_s):
        _signal_all(live_members(leader), signal.SIGKILL)
        _all_gone(leader, _DEATH_S)
    if files:
        remove(files, spare=all_processes())


def _signal_all(processes: list[int], number: signal.Signals) -> bool:
    """Whether there was anybody to signal."""
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
        time.sleep(_LOOK_S)
    return True
