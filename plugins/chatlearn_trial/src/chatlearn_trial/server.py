"""The process that forks one process for each task, so that no task sees what another did, and follows them."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from chatlearn_trial.files import module_facts
from chatlearn_trial.outcome import Outcome
from chatlearn_trial.process_state import ProcessState

POLL_S = 0.005
STACK_S = 0.5
"""Time after the limit in which a process writes where it hangs, seconds."""


@dataclass(slots=True)
class Attempt:
    """One task in a running process."""

    index: int
    title: str
    started: float
    told: bool = False


def main() -> None:
    """Read the job from standard input, run its tasks, and write ``<index>.json`` for each that ended."""
    job = json.loads(sys.stdin.buffer.read())
    sys.path[:] = job["path"]
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    directory, limit_s = Path(job["directory"]), job["limit_s"]
    waiting = deque(enumerate(job["tasks"]))
    running: dict[int, Attempt] = {}
    while waiting or running:
        while waiting and len(running) < job["at_once"]:
            index, (title, argument) = waiting.popleft()
            pid = os.fork()
            if pid == 0:
                _attempt(function, argument, directory, index, limit_s)
            running[pid] = Attempt(index, title, time.monotonic())
        time.sleep(POLL_S)
        for pid, attempt in list(running.items()):
            lost = _follow(pid, attempt, directory, limit_s, job["notice_s"])
            if lost is None:
                continue
            del running[pid]
            if not (directory / f"{attempt.index}.json").exists():
                _write(directory, attempt.index, Outcome(lost=lost))


def _follow(pid: int, attempt: Attempt, directory: Path, limit_s: float, notice_s: float) -> str | None:
    """How a process ended; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        return f"ended the process{_how(os.waitstatus_to_exitcode(status))}"
    taken = time.monotonic() - attempt.started
    if taken >= limit_s + STACK_S:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"did not end within {limit_s:g} s{_place(directory / f'{attempt.index}.stacks')}"
    if taken >= notice_s and not attempt.told:
        attempt.told = True
        print(f"{attempt.title} ...", file=sys.stderr, flush=True)
    return None


def _attempt(function: Any, argument: Any, directory: Path, index: int, limit_s: float) -> NoReturn:
    """Run one task in the forked process and write its outcome."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        with (directory / f"{index}.stacks").open("wb") as stacks:
            faulthandler.dump_traceback_later(limit_s, file=stacks)
            before, modules = ProcessState.now(), set(sys.modules)
            try:
                result = function(*argument)
            except Exception:
                result = ""  # the caller runs it, too, and shows the error
            patched, changed = before.differences()
            files = module_facts({name: module for name, module in list(sys.modules.items()) if name not in modules})
            _write(directory, index, Outcome(result, "", patched, changed, files))
            os._exit(0)  # regardless of threads that the task left running
    finally:
        os._exit(1)


def _write(directory: Path, index: int, outcome: Outcome) -> None:
    aside = directory / f"{index}.part"
    aside.write_bytes(json.dumps(asdict(outcome)).encode())
    aside.replace(directory / f"{index}.json")


def _place(stacks: Path) -> str:
    """Where a task hangs: the innermost line of a file outside Python's own library."""
    lines = [line.strip() for line in stacks.read_text(errors="replace").splitlines() if "File " in line]
    own = [line for line in lines if "<frozen" not in line and f"{os.sep}lib{os.sep}python" not in line]
    return f"; it hangs in {(own or lines)[0].removeprefix('File ')}" if lines else ""


def _how(code: int) -> str:
    return f" with exit code {code}" if code >= 0 else f" by signal {-code} ({signal.Signals(-code).name})"
