"""Finds what a test leaves behind: processes, shared memory, listening ports, files, changed state. Linux only."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatlearn_hosting.engine_side.shared_files import mapped_files
from chatlearn_testing.listeners import tcp_ports
from chatlearn_testing.processes import command, descendants, environment, open_files, processes

MARK = "CHATLEARN_TEST_MARK"
"""Environment variable that identifies every process started by a test, even after its parent has ended."""
SHARED_MEMORY = Path("/dev/shm")
MEMORY_NAMES = ("chatlearn", "torch_")
"""Prefixes of the names of ChatLearn's and torch's files. All programs share ``/dev/shm``, which does not record the
creator of a file, so other names are ignored.
"""
WAIT_S = 60.0
"""Time for processes to end and memory to be freed, seconds: a process notices the death of its parent late."""
_LOOK_EVERY_S = 0.1
_OUTLIVING = ("raylet", "gcs_server", "/ray/", "ray._private", "multiprocessing.resource_tracker")


@dataclass(slots=True)
class Leftovers:
    """Compares the state before and after a test; a context manager, also used by the fixture ``leaves_nothing``."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    wait_s: float = WAIT_S
    memory_names: tuple[str, ...] = MEMORY_NAMES
    _memory: frozenset[str] = frozenset()
    _ports: frozenset[int] = frozenset()
    _children: frozenset[int] = frozenset()
    _outer_mark: str | None = None

    def __enter__(self) -> Leftovers:
        self._memory, self._ports = shared_memory(), tcp_ports(os.getpid())
        self._children = frozenset(descendants(os.getpid()))
        self._outer_mark = os.environ.get(MARK)
        os.environ[MARK] = self.mark
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._outer_mark is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = self._outer_mark
        if kind is None:  # the error of a failed test matters more
            self.check()

    def check(self) -> None:
        """Wait up to ``wait_s`` until nothing is left behind.

        Raises:
            AssertionError: names what is left.
        """
        left = wait_until_empty(self.find, self.wait_s)
        assert not left, "left behind: " + "; ".join(left)

    def find(self) -> list[str]:
        """List what the test started or created and has not removed, one text each."""
        started = {pid for pid in processes() if environment(pid).get(MARK) == self.mark}
        started |= set(descendants(os.getpid())) - self._children
        found = [f"process {pid}: {command(pid)}" for pid in sorted(started) if not outlives_tests(command(pid))]
        memory = {name for name in shared_memory() - self._memory if name.startswith(self.memory_names)}
        found += [f"shared memory {name}" for name in sorted(unheld(frozenset(memory)))]
        found += [f"port {port}, listening" for port in sorted(tcp_ports(os.getpid()) - self._ports)]
        return found


def wait_until_empty(find: Callable[[], list[str]], wait_s: float = WAIT_S) -> list[str]:
    """Call ``find`` until it returns nothing, for at most ``wait_s`` seconds; returns its last result."""
    deadline = time.monotonic() + wait_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    return found


_watching: list[set[str]] = []
"""Sets that collect the files opened for writing; an audit hook cannot be removed, so one hook fills them all."""
_hooked = False
_WRITES = os.O_WRONLY | os.O_RDWR
_NO_LEFTOVERS = (
    "/__pycache__/",
    "/.pytest_cache/",
    "/.cache/",
    "/.coverage",
    "/torchinductor_",
    "/.triton/",
    "/dev/null",
    "/dev/tty",
    "/proc/",
)
"""Parts of the paths of caches, which outlive processes on purpose, and of devices."""


@contextmanager
def written_files() -> Iterator[set[str]]:
    """Collect the paths of files that this process opens for writing inside the block, compiled modules aside, and of
    the directories that it makes.
    """
    global _hooked
    if not _hooked:
        sys.addaudithook(_collect)
        _hooked = True
    found: set[str] = set()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching[:] = [other for other in _watching if other is not found]  # two may hold equal paths


def _collect(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.mkdir") or not _watching:
        return
    path, writes = arguments[0], event == "os.mkdir" or bool(arguments[2] & _WRITES)
    if not isinstance(path, str) or not writes or any(part in f"{path}/" for part in _NO_LEFTOVERS):
        return
    if os.path.isdir(path):  # noqa: PTH112  # it is there already, or TemporaryFile names its folder
        return
    for found in _watching:
        found.add(str(Path(path).absolute()))


def outlives_tests(command_line: str) -> bool:
    """Whether a process may outlive a test: Ray's servers and idle workers, and Python's resource tracker."""
    title = command_line.removeprefix("ray::")
    if title != command_line:
        return title.startswith("IDLE")
    return any(name in command_line for name in _OUTLIVING)


def shared_memory() -> frozenset[str]:
    """Return the file names in ``/dev/shm``."""
    return frozenset(entry.name for entry in SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else frozenset()


def unheld(names: frozenset[str], besides: int | None = None) -> set[str]:
    """Select the names that no living process other than ``besides`` has open or mapped; these would stay for ever."""
    others = [pid for pid in processes() if pid != besides] if names else []
    held = mapped_files(others).union(*map(open_files, others))
    return {name for name in names if str(SHARED_MEMORY / name) not in held}
