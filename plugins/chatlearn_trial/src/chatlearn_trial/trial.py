"""Runs a function on each of several tasks, every one in a process of its own with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chatlearn_trial.outcome import Outcome

START_S = 60.0
"""Time in which the server must have started and imported the function, seconds."""


@dataclass(slots=True, frozen=True)
class Task:
    """One call of the function."""

    title: str
    """Shown with ``...`` where it takes long: ``importing acme-reward 1.2``."""
    argument: tuple[str, ...]


def try_apart(
    function: str, tasks: Mapping[str, Task], *, limit_s: float, notice_s: float = 2.0, at_once: int = 4
) -> dict[str, Outcome]:
    """Run ``function(*argument) -> str`` on each task, and say what became of each.

    The processes are forked from one that has the function imported, so that a task costs milliseconds, and none
    sees what another did. Their output is dropped. A server that cannot run says nothing about tasks: they are left
    out of what is returned.

    Args:
        function: import string, ``module:name``; the module must not start threads.
        tasks: by a key of the caller's.
        limit_s: time limit of each task, seconds.
        notice_s: after this time the title of a task is written to standard error, seconds.
        at_once: number of tasks that run at the same time.
    """
    keys = list(tasks)
    with tempfile.TemporaryDirectory(prefix="chatlearn-trial-", ignore_cleanup_errors=True) as directory:
        job = {
            "path": sys.path,
            "function": function,
            "directory": directory,
            "tasks": [[task.title, list(task.argument)] for task in tasks.values()],
            "limit_s": limit_s,
            "notice_s": notice_s,
            "at_once": at_once,
        }
        with contextlib.suppress(OSError):  # no process can be started
            _serve(json.dumps(job).encode(), START_S + (limit_s + 1.0) * -(-len(tasks) // at_once))
        found = {}
        for index, key in enumerate(keys):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found[key] = _read(Path(directory) / f"{index}.json")
        return found


def _serve(job: bytes, limit_s: float) -> None:
    server = subprocess.Popen(  # -P: a file in the current directory is not taken for a module
        [sys.executable, "-P", "-c", "from chatlearn_trial.server import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.communicate(job, timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # with whatever the tasks started
        server.wait()


def _read(file: Path) -> Outcome:
    entry = json.loads(file.read_bytes())
    files = {name: (changed, size) for name, (changed, size) in entry.pop("files").items()}
    patched, changed = (tuple(entry.pop(name)) for name in ("patched", "changed"))
    return Outcome(**entry, files=files, patched=patched, changed=changed)
