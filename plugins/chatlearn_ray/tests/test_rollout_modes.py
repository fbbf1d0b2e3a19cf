"""Rollouts that are made while the trainer updates, with generators in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins

from .small_run import write_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
CHATLEARN = (sys.executable, "-c", "from chatlearn_cli.main import main; main()")
RAGGED = ("sampling.stop=['0', '1', '2', '3', '4', '5', '6']", "algorithm.options.importance_correction=truncate")
"""Completions of different lengths, and the correction that stale tokens need."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def users_directory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)


async def train_on_ray(small: Path, name: str, *overrides: str, resume: Any = "never") -> Path:
    registry = discover_plugins()
    output = small.parent / name
    loaded = load_config(small, [f"output_dir={output}", "runtime.backend=ray", *RAGGED, *overrides], registry)
    await Run(assemble(loaded, registry)).train(resume)
    return output


def train_locally(small: Path, name: str, *overrides: str) -> Path:
    """In a process of its own, so that no thread or seed of this one matters."""
    output = small.parent / name
    command = [*CHATLEARN, "run", str(small), f"output_dir={output}", *RAGGED, *overrides]
    subprocess.run(command, check=True, cwd=small.parent, timeout=300)
    return output


def lines(run_dir: Path) -> list[Mapping[str, float]]:
    file = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def model_bytes(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("ray_session")
async def test_without_staleness_async_is_bit_identical_to_sync(small: Path) -> None:
    sync = train_locally(small, "sync")
    found = await train_on_ray(small, "async", "rollout.mode=async", "rollout.max_staleness=0")
    assert all(line["rollout/staleness_max"] == 0 for line in lines(found))
    assert model_bytes(found) == model_bytes(sync)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.thorough
async def test_one_step_off_resumes_after_its_driver_was_killed_and_is_bit_identical_to_the_local_runtime(
    small: Path, cluster: Any
) -> None:
    mode = ("rollout.mode=one_step_off", f"runtime.options.address={cluster.address}")
    local = train_locally(small, "local", mode[0])
    output = small.parent / "killed"
    settings = [f"output_dir={output}", "runtime.backend=ray", *RAGGED, *mode]
    driver = subprocess.Popen([*CHATLEARN, "run", str(small), *settings], cwd=small.parent)
    try:
        deadline = time.monotonic() + 300
        while not (output / "checkpoints/step_00000001/checkpoint.json").exists():
            assert driver.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.wait()
    assert not (output / "model").exists(), "it was killed before its end"
    found = await train_on_ray(small, "killed", *mode, resume="auto")
    assert [line["rollout/staleness_mean"] for line in lines(found)] == [0, 1, 1]
    assert model_bytes(found) == model_bytes(local)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("how", [pytest.param("abort", marks=pytest.mark.thorough), "pause"])
async def test_unfinished_completions_outlast_weight_syncs_of_replicas_that_change_one_by_one(
    how: str, small: Path
) -> None:
    settings = ("rollout.mode=async", "rollout.max_staleness=2", f"rollout.options.during_sync={how}")
    several = ("roles.generator.replicas=2", "weight_sync.fleet_rule=rolling")
    # Few sequences at a time, so that the rollouts of later steps last longer than an update.
    slow = ("sampling.max_tokens=200", "sampling.stop=[]", "roles.generator.options.max_num_sequences=4")
    output = await train_on_ray(small, how, *settings, *several, *slow)
    metrics = lines(output)
    assert [line["rollout/staleness_max"] for line in metrics] == [0, 1, 2]
    assert all(line["rollout/dropped_stale"] == 0 for line in metrics)
    assert metrics[-1]["rollout/in_flight"] == 0
    assert all(line["samples/trained"] == line["samples/admitted"] for line in metrics)
    if how == "abort":
        record = [json.loads(line) for line in (output / "admissions.jsonl").read_text().splitlines()]
        assert any(len(line.get("ends", ())) > 1 for line in record), "a weight sync within a completion"
