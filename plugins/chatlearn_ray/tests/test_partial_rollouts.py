"""Rollouts that last longer than a step, with generators in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins

from .small_run import write_run

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
CHATLEARN = (sys.executable, "-c", "from chatlearn_cli.main import main; main()")
RAGGED = (
    "sampling.max_tokens=16",
    "sampling.stop=['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']",
    "algorithm.options.importance_correction=truncate",
)
"""Completions of different lengths, and the correction that stale tokens need."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("small"))


async def train_on_ray(small: Path, name: str, *overrides: str) -> Path:
    registry = discover_plugins()
    output = small.parent / name
    loaded = load_config(small, [f"output_dir={output}", "runtime.backend=ray", *RAGGED, *overrides], registry)
    await Run(assemble(loaded, registry)).train("never")
    return output


def lines(run_dir: Path) -> list[Mapping[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("ray_session")
async def test_rounds_are_bit_identical_to_those_of_the_local_runtime(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(small.parent)
    rounds = ("rollout.partial=resume", "rollout.round_tokens=4", "rollout.in_flight_prompts=5")
    local = small.parent / "local"
    subprocess.run(
        [*CHATLEARN, "run", str(small), f"output_dir={local}", *RAGGED, *rounds],
        check=True,
        cwd=small.parent,
        timeout=300,
    )
    ray = await train_on_ray(small, "ray", *rounds)
    assert max(line["rollout/staleness_max"] for line in lines(local)) > 0
    for name in ("policy/loss", "policy/importance_weight", "rollout/stale_tokens", "rollout/pending"):
        assert [line[name] for line in lines(ray)] == [line[name] for line in lines(local)]
    assert (ray / "model/model.safetensors").read_bytes() == (local / "model/model.safetensors").read_bytes()


@pytest.mark.usefixtures("ray_session")
async def test_kept_requests_outlast_a_sync_in_the_workers(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    # Long enough for the driver to hear of the first and pause the others.
    keep = (
        "rollout.partial=keep",
        "rollout.in_flight_prompts=6",
        "train.prompts_per_step=2",
        "sampling.max_tokens=400",
    )
    output = await train_on_ray(small, "keep", *keep, "sampling.stop=['7']", "roles.generator.replicas=2")
    metrics = lines(output)
    assert all(line["rollout/prompts"] >= 2 for line in metrics)
    assert max(line["rollout/staleness_max"] for line in metrics) > 0, "tokens of two versions in one completion"
    totals = json.loads((output / "summary.json").read_text())["totals"]
    drawn = 6 + sum(line["rollout/prompts"] for line in metrics[:-1])
    assert 4 * drawn == totals["samples/total"] + metrics[-1]["rollout/pending"], "nothing lost, nothing twice"
    assert totals["samples/excluded"] == 0
