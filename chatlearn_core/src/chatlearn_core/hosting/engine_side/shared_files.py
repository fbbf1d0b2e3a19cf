"""Files in shared memory that an engine's processes have mapped, and their removal when these processes end.

Semaphores, queues and load tables of an engine are files in ``/dev/shm`` that its processes remove when they end in
order. A process that is killed removes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DIRECTORY = "/dev/shm/"
_DELETED = " (deleted)"


def mapped_files(processes: Iterable[int]) -> set[str]:
    """Named files in shared memory that these processes map now."""
    found: set[str] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue  # it has ended, or is not ours to look at
        for line in lines:
            start = line.find(DIRECTORY)
            if start >= 0 and not line.endswith(_DELETED):
                found.add(line[start:])
    return found


def remove(files: set[str], *, spare: Iterable[int] = ()) -> None:
    """Unlink files, except those that the processes in ``spare`` map. A mapping stays valid without its name."""
    if not files:
        return
    for file in files - mapped_files(spare):
        Path(file).unlink(missing_ok=True)
