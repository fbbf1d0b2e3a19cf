"""Ending a process together with everything it started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_LOOK_S = 0.05
_DEATH_S = 5.0
"""How long a process that was killed may take to disappear: its memory has to be freed."""


def live_members(leader: int) -> list[int]:
    """Processes in the group or the session that ``leader`` leads, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may hold anything; fixed fields follow its last parenthesis.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        state, _, group, session = fields[:4]
        if state not in ("Z", "X") and leader in (int(group), int(session)):
            members.append(int(entry.name))
    return members


def end_group(leader: int, grace_s: float) -> None:
    """Ask every process of a group to end, and kill those that still run after ``grace_s``.

    The leader must not have been waited for: until then its id cannot belong to anybody else.
    """
    if not _signal_all(live_members(leader), signal.SIGTERM) or _all_gone(leader, grace_s):
        return
    _signal_all(live_members(leader), signal.SIGKILL)
    _all_gone(leader, _DEATH_S)


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
