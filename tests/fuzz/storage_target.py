"""A run on storage that fails: what ``test_storage_faults.py`` starts in processes of their own.

An audit hook sees what the interpreter does with files of the run's directory, and makes it fail from a chosen
operation on. A limit of the file size does the same to what writes past the interpreter (torch, safetensors): the
kernel takes a part of a write and refuses the rest, as a full disk does.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

PATHS_OF = {
    "open": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.mkdir": 1,
    "os.rmdir": 1,
    "os.scandir": 1,
    "os.listdir": 1,
    "os.truncate": 1,
}
"""Audited operations, with how many of their arguments are paths."""


class Storage:
    """Counts operations on the files below ``directory``, and lets those that the fault says fail."""

    def __init__(self, directory: str, kind: str, at: int, num_operations: int, num_bytes: int) -> None:
        self.directory = directory
        self.kind = kind
        self.failing = range(at, at + num_operations)
        self.num_bytes = num_bytes
        self.count = 0

    def watch(self) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.addaudithook(self._audit)
        fsync = os.fsync

        def watched(descriptor: int) -> None:  # not audited
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(self.directory):
                self._operation("fsync")
            fsync(descriptor)

        os.fsync = watched

    def heal(self) -> None:
        self.kind = "none"
        limit_file_size(resource.RLIM_INFINITY)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in PATHS_OF:
            return
        for path in arguments[: PATHS_OF[event]]:
            if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(self.directory):
                self._operation(event)

    def _operation(self, event: str) -> None:
        self.count += 1
        if self.count not in self.failing:
            if self.kind == "full" and self.count == self.failing.stop:
                limit_file_size(resource.RLIM_INFINITY)
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "full":
            limit_file_size(self.num_bytes)
        elif self.kind != "none":
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number), f"{self.directory} ({event})")


def limit_file_size(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def train(order: dict[str, Any]) -> dict[str, Any]:
    """``chatlearn run`` in this process: its exit code, and how often it used its directory."""
    from chatlearn_cli.main import main

    storage = Storage(order["directory"], **order["fault"])
    storage.watch()
    try:
        main(["run", order["file"]])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        storage.heal()
    return {"code": code, "count": storage.count}
