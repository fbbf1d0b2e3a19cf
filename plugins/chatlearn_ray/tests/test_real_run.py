"""GRPO with the real trainer and generator: local and Ray agree (invariant 6), and killed workers change nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins

from .small_run import STEPS, write_run

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("leaves_nothing"),
]
CHATLEARN = (sys.executable, "-c", "from chatlearn_cli.main import main; main()")
RAY = "runtime.backend=ray"
ALL_GONE_S = 25.0
"""After the driver was killed; Ray's own agents would stay for longer, and the guard gives workers five seconds."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of the run that every test of this module makes."""
    return write_run(tmp_path_factory.mktemp("small"))


class Killer(RunListener):
    """Kills a trainer rank after step 1, and a generator replica as step 3 begins to generate."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.killed: list[str] = []
        self.warnings: list[str] = []

    def kill(self, what: str, worker: Any) -> None:
        if what not in self.killed:
            self.killed.append(what)
            os.kill(worker.facts.pid, signal.SIGKILL)

    def phase(self, step: int, name: str) -> None:
        runtime: Any = self.run.runtime if self.run is not None else None
        if (step, name) == (2, "generating"):
            self.kill("trainer", runtime.trainer("trainer").workers[0])
        if (step, name) == (3, "generating"):
            self.kill("generator", runtime.generator("generator").replicas[0].worker)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


async def train(small: Path, name: str, *overrides: str, listener: Killer | None = None) -> Path:
    registry = discover_plugins()
    output = small.parent / name
    loaded = load_config(small, [f"output_dir={output}", *overrides], registry)
    run = Run(assemble(loaded, registry), listener=listener)
    if listener is not None:
        listener.run = run
    await run.train("never")
    return output


def model_bytes(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def losses(run_dir: Path) -> list[float]:
    return [line["policy/loss"] for line in lines(run_dir)]


def lines(run_dir: Path) -> list[Mapping[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def local(small: Path) -> Path:
    """The run in one process; in a process of its own, so that no thread or seed of this one matters."""
    output = small.parent / "local"
    command = [*CHATLEARN, "run", str(small), f"output_dir={output}"]
    subprocess.run(command, check=True, cwd=small.parent, timeout=300)
    return output


@pytest.fixture
def users_directory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_session", "users_directory")
async def test_two_ranks_and_two_replicas_have_the_same_losses(small: Path, local: Path) -> None:
    output = await train(small, "ranks", RAY, "roles.trainer.ranks=2", "roles.generator.replicas=2")
    assert losses(output) == pytest.approx(losses(local), abs=1e-5)
    for name in ("response_length/mean", "policy/grad_norm"):
        assert [line[name] for line in lines(output)] == pytest.approx([line[name] for line in lines(local)], rel=1e-4)


@pytest.mark.usefixtures("ray_session", "users_directory")
async def test_one_rank_on_ray_is_bit_identical_to_local_and_killed_workers_change_nothing(
    small: Path, local: Path
) -> None:
    killer = Killer()
    output = await train(small, "killed", RAY, "memory.offload=always", listener=killer)
    trace = [json.loads(line) for line in (output / "trace.jsonl").read_text().splitlines()]
    assert trace
    assert not any("live_bytes" in entry for entry in trace), "each has a place of its own, so nothing is moved"
    assert max(abs(loss) for loss in losses(local)) > 1e-4, "losses of zero would prove nothing"
    assert killer.killed == ["trainer", "generator"]
    assert any("The trainer was rebuilt; training continues from step 1" in text for text in killer.warnings)
    assert [line["step"] for line in lines(output)] == [1, 2, 3]
    assert losses(output) == losses(local)
    assert model_bytes(output) == model_bytes(local)
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["totals"]["samples/trained"]) == ("completed", STEPS * 16)


def marked_processes(mark: str) -> list[str]:
    """Command lines of processes whose environment holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended meanwhile
    return found


def test_a_killed_driver_leaves_no_process_and_resumes(small: Path, local: Path) -> None:
    """A Ray of its own, with the token that it asks for by default, the driver killed after step 1; the local runtime
    finishes what Ray began.
    """
    mark = uuid.uuid4().hex
    output = small.parent / "driver"
    command = [*CHATLEARN, "run", str(small), f"output_dir={output}"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment["CHATLEARN_TEST_MARK"] = mark
    driver = subprocess.Popen([*command, RAY], cwd=small.parent, env=environment)
    try:
        deadline = time.monotonic() + 300
        while not (output / "metrics.jsonl").exists() or not lines(output):
            assert driver.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(marked_processes(mark)) > 4
    finally:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + ALL_GONE_S
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left
    subprocess.run(command, check=True, cwd=small.parent, timeout=300)
    assert model_bytes(output) == model_bytes(local)
