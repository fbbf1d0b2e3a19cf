"""Files in shared memory that an engine's processes have mapped, and their removal when these processes end.

Semaphores, queues and load tables of an engine are files in ``/dev/shm`` that its processes remove when they end in
order. A process that is killed removes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_INODE_FIELD = 4
"""Of a line in ``/proc/<pid>/maps``."""


def mapped_files(processes: Iterable[int]) -> set[str]:
    """Files in shared memory that have a name and that these processes map now.

    Looked up by inode: a POSIX semaphore is mapped under a name that it loses when it gets its own.
    """
    names = _names_by_inode()
    found: set[str] = set()
    for process in processes if names else ():
        try:
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue  # it has ended, or is not ours to look at
        for line in lines:
            if f"{DIRECTORY}/" in line:
                name = names.get(line.split(maxsplit=_INODE_FIELD + 1)[_INODE_FIELD])
                if name is not None:
                    found.add(name)
    return found


def remove(files: set[str], *, spare: Iterable[int] = ()) -> None:
    """Unlink files, except those that the processes in ``spare`` map. A mapping stays valid without its name."""
    if files:
        for file in files - mapped_files(spare):
            with contextlib.suppress(OSError):  # it is gone, or another user's
                Path(file).unlink()


def _names_by_inode() -> dict[str, str]:
    names: dict[str, str] = {}
    try:
        for entry in DIRECTORY.iterdir():
            with contextlib.suppress(OSError):  # it was removed while we looked
                names[str(entry.stat().st_ino)] = str(entry)
    except OSError:
        return {}  # this system has no such directory
    return names
