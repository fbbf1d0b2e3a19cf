"""Runs the checks of plugins in child processes; if one hangs or ends, another runs the remaining checks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_hosting.stack_file import StackFile
from chatlearn_testing.cli.check_entries import STACK_SIGNAL, Check, TestRun

START_S = 60.0
"""Time added to the limit until a child's first test, before which it imports torch and pytest, seconds."""


@dataclass(slots=True)
class _Progress:
    """Progress of the checks of one plugin."""

    entry: PluginEntry
    checks: list[Check] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """Names of the tests with a result."""
    running: str = ""
    """Name of the test that started last; empty if none did."""
    began: float = 0.0
    """When that test started, by ``time.monotonic``."""
    ended: bool = False

    def add(self, test: str, verdict: Literal["passed", "failed", "skipped"], reason: str) -> None:
        """Record a result in the latest check; a test with two results, such as of call and teardown, counts twice."""
        suite = self.checks[-1]
        told = f"{test}: {reason}" if test else reason
        if verdict == "passed":
            suite.passed += 1
        elif verdict == "failed":
            suite.failures.append(told)
        else:
            suite.not_applicable.append(told)
        if test:
            self.done.append(test)
            suite.tests.append(TestRun(test, verdict, reason, round(time.monotonic() - self.began, 3)))


def run_checks(
    distribution: str,
    entries: Sequence[PluginEntry],
    model: Path | None,
    reference: str | None,
    *,
    test_limit_s: float,
    limit_s: float,
) -> list[Check]:
    """Check the plugins of a distribution one after the other.

    Args:
        distribution: name of the distribution that registers ``entries``.
        model: a small float32 model directory for trainers and generators.
        reference: ``module:function`` that loads the model as a plain module.
        test_limit_s: time after which a test, or the preparation for it, counts as hanging, seconds.
        limit_s: time for all checks together, seconds; tests that have not started by then do not run.
    """
    waiting = [_Progress(entry) for entry in entries]
    everything = list(waiting)
    deadline = time.monotonic() + limit_s
    while waiting:
        lost = _one_child(distribution, waiting, model, reference, test_limit_s, deadline)
        waiting = [progress for progress in waiting if not progress.ended]
        if not lost or not waiting:
            break
        if time.monotonic() >= deadline:
            for progress in waiting:
                _stop(progress, limit_s)
            break
        _blame(waiting[0], lost, test_limit_s)
        if not waiting[0].running:  # it failed before a test started, and would fail again
            waiting.pop(0)
        else:
            waiting[0].running = ""
    return [check for progress in everything for check in progress.checks]


def _blame(progress: _Progress, lost: str, test_limit_s: float) -> None:
    """Record that the child process hung or ended while it checked a plugin."""
    if not progress.checks:
        progress.checks.append(Check(progress.entry.kind or "?", progress.entry.name, "record"))
    what = lost.format(limit=f"{test_limit_s:g} s (--test-timeout)")
    progress.add(progress.running, "failed", what if progress.running else f"the suite could not be run: {what}")


def _stop(progress: _Progress, limit_s: float) -> None:
    """Record that the time for all checks ran out before a plugin was done."""
    reason = f"the limit of {limit_s:g} s for everything (--timeout) was over before all tests were run"
    if not progress.checks:
        progress.checks.append(Check(progress.entry.kind or "?", progress.entry.name, "record"))
    progress.add("", "failed", reason)


def _one_child(
    distribution: str,
    waiting: Sequence[_Progress],
    model: Path | None,
    reference: str | None,
    test_limit_s: float,
    deadline: float,
) -> str:
    """Check the waiting plugins in a child process; returns how the child failed, or an empty string."""
    reading, writing = os.pipe()
    stacks = StackFile()
    job = {
        "path": sys.path,
        "distribution": distribution,
        "entries": [[f"{one.entry.kind}/{one.entry.name}", one.done] for one in waiting],
        "model": str(model.absolute()) if model is not None else None,
        "reference": reference,
        "report": writing,
        "stacks": stacks.descriptor,
    }
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", "from chatlearn_testing.cli.check_entries import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(writing, stacks.descriptor),
            start_new_session=True,
        )
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as reports:
            try:
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError), child.stdin:
                    child.stdin.write(json.dumps(job).encode())
                lost = _follow(reports, waiting, test_limit_s, deadline)
                if lost == "hangs":
                    return f"did not end within {{limit}}; {_place(stacks.ask(child.pid, STACK_SIGNAL))}"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                status = child.wait()
        return f"ended the process ({_how(status)})" if lost else ""
    finally:
        stacks.close()


def _follow(reports: IO[bytes], waiting: Sequence[_Progress], test_limit_s: float, deadline: float) -> str:
    """Process a child's reports until it is done; returns ``hangs``, ``ended``, or an empty string on success."""
    text = b""
    current: _Progress | None = None
    starting = True
    limit = time.monotonic() + test_limit_s + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(reports, selectors.EVENT_READ)
        while True:
            if not selector.select(max(min(limit, deadline) - time.monotonic(), 0)):
                return "hangs"
            data = reports.read(1 << 16)
            if not data:
                return "ended"
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                kind, *content = json.loads(line)
                starting = starting and kind != "test"
                limit = time.monotonic() + test_limit_s + (START_S if starting else 0.0)
                if kind in ("entry", "end") and current is not None:
                    current.ended = True
                if kind == "entry":
                    current = waiting[content[0]]
                elif kind == "end":
                    return ""
                elif current is not None:
                    _take(current, kind, content)


def _take(current: _Progress, kind: str, content: list[Any]) -> None:
    if kind == "check":
        known = {(check.kind, check.name, check.suite) for check in current.checks}
        check = Check(**content[0])
        if (check.kind, check.name, check.suite) not in known:
            current.checks.append(check)
    elif kind == "test":
        current.running, current.began = content[0], time.monotonic()
    else:
        assert kind == "verdict", kind
        current.add(*content)


def _place(stack: str | None) -> str:
    """Describe where a child hangs: the first stack line outside Python's own library, or else the first line."""
    if not stack:
        return "it does not say where"
    lines = [line.strip() for line in stack.splitlines() if "File " in line]
    own = [line for line in lines if f"{os.sep}lib{os.sep}python" not in line and "<frozen" not in line]
    return f"it hangs in {(own or lines or [stack])[0].removeprefix('File ')}"


def _how(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {-status} ({signal.Signals(-status).name})"
