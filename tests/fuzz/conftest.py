"""What fuzz tests share: numbered cases, and processes in which a case may crash or hang.

A fuzz test draws what it tries from the random numbers of a case: ``for case in cases(quick=20): ...case.random...``.
``make test`` runs the first ``quick`` cases, always the same ones. ``make test-fuzz`` sets ``CHATLEARN_FUZZ_SECONDS``,
which all fuzz tests share, and begins at a random case or at ``CHATLEARN_FUZZ_SEED``. A failing case is reported with
the command that runs it alone.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

SECONDS = "CHATLEARN_FUZZ_SECONDS"
SEED = "CHATLEARN_FUZZ_SEED"
HERE = Path(__file__).parent
PRELOADED = (
    "chatlearn_cli.evaluation",
    "chatlearn_cli.main",
    "chatlearn_core.executor.run",
    "chatlearn_local.runtime",
    "chatlearn_fsdp.trainer",
    "chatlearn_hf.family",
    "chatlearn_transformers.generator",
    "transformers.models.qwen3.modeling_qwen3",
    "configuration_target",
)
"""Imported once by the server that the processes of all cases are forked from."""
MEMORY_BYTES = 16 << 30
"""Address space of a case's process: torch and its threads reserve several GiB."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose the first case of a timed run; the workers of xdist inherit it."""
    if SECONDS in os.environ:
        os.environ.setdefault(SEED, str(secrets.randbelow(10**9)))


def pytest_report_header() -> str:
    if SECONDS not in os.environ:
        return "fuzz: the fixed cases (make test-fuzz tries others)"
    return f"fuzz: {os.environ[SECONDS]} s from {SEED}={os.environ[SEED]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fuzz tests are slow, and share the time."""
    fuzz = [item for item in items if item.path.is_relative_to(HERE)]
    drawing = [item for item in fuzz if "cases" in getattr(item, "fixturenames", ())]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for item in fuzz:
        item.add_marker(pytest.mark.fuzz)
        item.add_marker(pytest.mark.slow)
        if SECONDS in os.environ and item in drawing:
            share = float(os.environ[SECONDS]) * workers / len(drawing)
            item.user_properties.append(("fuzz_seconds", share))
            item.add_marker(pytest.mark.timeout(share + 300))


@dataclass
class Case:
    """What one case of a fuzz test draws from."""

    test: str
    number: int

    @cached_property
    def random(self) -> random.Random:
        """Random numbers of this test and case."""
        return random.Random(f"{self.test}/{self.number}")

    @property
    def again(self) -> str:
        """The command that runs this case alone."""
        return f"{SECONDS}=0 {SEED}={self.number} make test-fuzz ARGS='-k {self.test}'"


@dataclass
class Cases:
    """Yields the cases of one test: a fixed few, or as many as there is time for."""

    test: str
    seconds: float | None
    current: Case | None = None

    def __call__(self, quick: int) -> Iterator[Case]:
        """``quick``: how many ``make test`` runs; they should take a few seconds together."""
        first = int(os.environ.get(SEED, "0"))
        began, number = time.monotonic(), first
        while number == first or (
            number < first + quick if self.seconds is None else time.monotonic() - began < self.seconds
        ):
            self.current = Case(self.test, number)
            yield self.current
            number += 1
        print(f"{self.test}: {number - first} cases from {first}")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Cases:
    """``for case in cases(quick=20)``: see above."""
    return Cases(request.node.name, dict(request.node.user_properties).get("fuzz_seconds"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell how to run a failing case again."""
    report = yield
    drawn = getattr(item, "funcargs", {}).get("cases")
    if report.failed and isinstance(drawn, Cases) and drawn.current is not None:
        report.sections.append(("fuzz", f"case {drawn.current.number}; run it again: {drawn.current.again}"))
    return report


@dataclass(frozen=True)
class Outcome:
    """How a function ended in a process of its own."""

    end: str
    """``returned``, ``raised``, ``exited`` (SystemExit), ``killed`` (a crash) or ``timed out``."""
    value: Any
    """What it returned."""
    code: int
    """Exit status; negative for a signal."""
    output: str
    """stdout and stderr; the stacks of all threads where it crashed or hung."""
    seconds: float


@dataclass
class Bounded:
    """Runs functions in forked processes with limits on time and memory."""

    process: subprocess.Popen[str]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(
        self, target: str, argument: Any, *, timeout_s: float = 60.0, memory_bytes: int = MEMORY_BYTES
    ) -> Outcome:
        """Call ``file.py:function`` (a file of this folder) with a JSON value; what it returns is JSON, too."""
        order = {
            "target": str(HERE / target),
            "argument": argument,
            "cwd": str(self.cwd),
            "env": dict(self.env),
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Outcome(**json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="session")
def fuzz_server(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The server that processes are forked from."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "fuzz_server.py"), *PRELOADED],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="session")
def bounded_in(fuzz_server: subprocess.Popen[str]) -> Callable[[Path], Bounded]:
    """``bounded_in(folder)``: the same as ``bounded``, for fixtures that outlive a test."""
    return lambda folder: Bounded(fuzz_server, folder)


@pytest.fixture
def bounded(fuzz_server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Outcome]:
    """``bounded("file.py:function", argument)``: an ``Outcome``, whatever the function does to its process."""
    return Bounded(fuzz_server, tmp_path)
