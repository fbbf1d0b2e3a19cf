"""A process's descendants, found in ``/proc`` and ended; Linux only. Imports only the standard library."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

MAX_ROUNDS = 100
"""Number of searches for new descendants; each freezes the processes that it finds, so even a fork bomb stops."""


def descendants(root: int) -> set[int]:
    """Return the children of ``root`` and all their descendants, including zombies."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):  # it ended meanwhile
                # The name in parentheses may contain any text; fixed fields follow its last parenthesis.
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    generation = {root}
    while generation := {child for child, parent in parents.items() if parent in generation} - found:
        found |= generation
    return found


def memory_bytes(root: int, beyond: int) -> int:
    """Return the memory of all descendants of ``root`` together; the cheap upper bound if that is at most ``beyond``.

    The bound counts a page that processes share once for each; above ``beyond`` each page counts once (``Pss``). Files
    in memory without a name (``memfd_create``) count in whole, whether they are mapped or not.
    """
    processes = _children(root)
    unnamed = _unnamed_files(processes)
    bound = unnamed + sum(_resident(process) for process in processes)
    return bound if bound <= beyond else unnamed + sum(_proportional(process) for process in processes)


def _children(root: int) -> set[int]:
    """Like ``descendants``, but reads only the tree, where the kernel lists children."""
    found, waiting = set[int](), [root]
    while waiting:
        tasks = Path(f"/proc/{waiting.pop()}/task")
        try:
            files = [task / "children" for task in tasks.iterdir()]
        except OSError:  # it ended meanwhile
            continue
        for file in files:
            try:
                children = {int(child) for child in file.read_bytes().split()}
            except FileNotFoundError:
                if file.parent.exists():
                    return descendants(root)  # the kernel lists none (CONFIG_PROC_CHILDREN)
            except OSError:
                continue
            else:
                waiting.extend(children - found)
                found |= children
    return found


def _unnamed_files(processes: set[int]) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for process in processes:
        with suppress(OSError):  # it ended meanwhile
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    if str(descriptor.readlink()).startswith("/memfd:"):
                        facts = descriptor.stat()
                        sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def _resident(process: int) -> int:
    with suppress(OSError, IndexError):  # it ended meanwhile
        return int(Path(f"/proc/{process}/statm").read_bytes().split()[1]) * resource.getpagesize()
    return 0


def _proportional(process: int) -> int:
    with suppress(OSError):  # it ended meanwhile, or the kernel does not tell
        for line in Path(f"/proc/{process}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return _resident(process)


def end_descendants(root: int) -> None:
    """Kill every descendant of ``root``. All are stopped first, so that none can start another meanwhile.

    If ``root`` is a subreaper (``PR_SET_CHILD_SUBREAPER``), this includes orphans in other sessions or groups.
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
    """Kill every process whose initial environment has this variable with this value.

    This finds processes whose common ancestor was killed, which ``end_descendants`` cannot; it does not find processes
    that cleared their environment.
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
    except OSError:  # it ended, or belongs to another user
        return False


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it ended, or changed its user
        os.kill(process, number)
