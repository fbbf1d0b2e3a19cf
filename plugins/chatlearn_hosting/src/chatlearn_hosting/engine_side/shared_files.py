"""Finds the files in shared memory that an engine's processes have mapped, and removes them when these processes end.

Semaphores, queues and load tables of an engine are files in ``/dev/shm``, which its processes remove at a regular exit.
A killed process removes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_INODE_FIELD = 4
"""Index of the inode in a line of ``/proc/<pid>/maps``."""


def mapped_files(processes: Iterable[int]) -> set[str]:
    """Return the named files in shared memory that these processes currently map.

    Looks them up by inode, because a POSIX semaphore is mapped under a temporary name before it gets its own.
    """
    names = _names_by_inode()
    found: set[str] = set()
    for process in processes if names else ():
        try:
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        for line in lines:
            if f"{DIRECTORY}/" in line:
                name = names.get(line.split(maxsplit=_INODE_FIELD + 1)[_INODE_FIELD])
                if name is not None:
                    found.add(name)
    return found


def remove(files: set[str], *, spare: Iterable[int] = ()) -> None:
    """Unlink files, except those that the processes in ``spare`` map. Existing mappings stay valid."""
    if files:
        for file in files - mapped_files(spare):
            with contextlib.suppress(OSError):  # the file is gone, or belongs to another user
                Path(file).unlink()


def _names_by_inode() -> dict[str, str]:
    names: dict[str, str] = {}
    try:
        for entry in DIRECTORY.iterdir():
            with contextlib.suppress(OSError):  # the file was removed in the meantime
                names[str(entry.stat().st_ino)] = str(entry)
    except OSError:
        return {}  # this system has no such directory
    return names
