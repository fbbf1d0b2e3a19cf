"""Processes, their parents and their open files. Linux only: it reads ``/proc``.

Every function takes a process that ends meanwhile for one that has nothing, since a test may kill any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def processes() -> list[int]:
    """All processes that have not ended."""
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and is_alive(int(entry.name))]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is more than a zombie."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in "ZX"


def descendants(pid: int) -> Iterator[int]:
    """Children, and theirs."""
    parents = {process: int(fields[1]) for process in processes() if (fields := _stat(process))}
    generation = {pid}
    while generation := {child for child, parent in parents.items() if parent in generation}:
        yield from generation


def session_members(session: int) -> list[str]:
    """Processes of a session (``setsid``), as ``pid: command``."""
    return [f"{pid}: {command(pid)}" for pid in processes() if (fields := _stat(pid)) and int(fields[3]) == session]


def command(pid: int) -> str:
    """Its command line; empty once it has ended."""
    return read_proc(pid, "cmdline").replace("\0", " ").strip()


def environment(pid: int) -> dict[str, str]:
    """The environment that it was started with; empty if it may not be read."""
    pairs = (entry.partition("=") for entry in read_proc(pid, "environ").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def open_files(pid: int) -> list[str]:
    """What its file descriptors stand for; empty once it has ended."""
    names = []
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                names.append(str(link.readlink()))
    except OSError:
        pass  # it ended, or belongs to somebody else
    return names


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session, ...; empty once it has ended."""
    return read_proc(pid, "stat").rpartition(")")[2].split()


def read_proc(pid: int, name: str) -> str:
    """A file of its directory in ``/proc``; empty once it has ended."""
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""  # it ended, or belongs to somebody else
