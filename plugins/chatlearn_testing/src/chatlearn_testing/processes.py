"""Processes, their parents and their open files. Linux only: it reads ``/proc``.

A process may end at any time, because tests kill processes: every function then returns an empty result for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def processes() -> list[int]:
    """Return the ids of all living processes."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and is_alive(int(entry.name))]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all living descendants, generation by generation."""
    parents = {process: int(fields[1]) for process in processes() if (fields := _stat(process))}
    generation = {pid}
    while generation := {child for child, parent in parents.items() if parent in generation}:
        yield from generation


def session_members(session: int) -> list[str]:
    """Return the processes of a session (``setsid``), as ``pid: command``."""
    return [f"{pid}: {command(pid)}" for pid in processes() if (fields := _stat(pid)) and int(fields[3]) == session]


def command(pid: int) -> str:
    """Return a process's command line; empty once it has ended."""
    return read_proc(pid, "cmdline").replace("\0", " ").strip()


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty without permission to read it."""
    pairs = (entry.partition("=") for entry in read_proc(pid, "environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def open_files(pid: int) -> list[str]:
    """Return the targets of a process's file descriptors, such as paths; empty once it has ended."""
    names = []
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                names.append(str(link.readlink()))
    except OSError:
        pass  # it ended, or belongs to another user
    return names


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session, ...; empty once it has ended."""
    return read_proc(pid, "stat").rpartition(")")[2].split()


def read_proc(pid: int, name: str) -> str:
    """Read a file in the process's directory of ``/proc``; empty once the process has ended."""
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""  # it ended, or belongs to another user
