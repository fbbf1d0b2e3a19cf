"""The package ``examples/custom_flow``, built as a wheel and installed apart: every configuration is shown and trains,
what the parts compute is computed again here.
"""

from __future__ import annotations

import csv
import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_flow"
CONFIGS = sorted((EXAMPLE / "configs").glob("*.yaml"))
STEPS, PROMPTS, GROUP = 3, 4, 4

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package and nothing else."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("custom-flow")
    build = ["hatchling", "build", "-t", "wheel", "-d", wheels]
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index", "--target", folder]
    for command in (build, [*pip, wheels / "custom_flow-1.0-py3-none-any.whl"]):
        subprocess.run([sys.executable, "-m", *map(str, command)], cwd=EXAMPLE, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``prepare.py`` writes."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        runpy.run_path(str(EXAMPLE / "prepare.py"), run_name="__main__")
    return folder / "runs"


@pytest.fixture
def run(chatlearn: Any, installed: Path, prepared: Path, site: Path, tmp_path: Path) -> Any:
    """``run(name)``: show the flow and train; what was shown, the lines of metrics, the rollouts, the directory."""
    shutil.copytree(prepared, tmp_path / "runs")
    path = os.pathsep.join(map(str, (site, installed)))

    def made(name: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]], Path]:
        file = EXAMPLE / "configs" / f"{name}.yaml"
        shown = chatlearn("flow", file, PYTHONPATH=path)
        assert shown.code == 0, shown.output
        finished = chatlearn("run", file, PYTHONPATH=path)
        assert finished.code == 0, finished.output
        run_dir = tmp_path / "runs" / "custom_flow" / name
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
        rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert len(metrics) == STEPS
        for line in metrics:
            assert line["policy/grad_norm"] > 0
            assert line["samples/trained"] == PROMPTS * GROUP
        return shown.output, metrics, rollouts, run_dir

    return made


def test_every_configuration_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {file.stem for file in CONFIGS} <= tested


def test_mixed_rewards(run: Any) -> None:
    shown, metrics, rollouts, run_dir = run("mixed_rewards")
    assert "style.scores" in shown
    tokenizer = AutoTokenizer.from_pretrained(run_dir.parent / "style")
    models = {
        name: AutoModelForSequenceClassification.from_pretrained(run_dir.parent / name).eval()
        for name in ("quality", "style")
    }

    def score(name: str, row: dict[str, Any]) -> float:
        ids = tokenizer.encode(row["prompt"]) + row["token_ids"]
        with torch.no_grad():
            hidden = models[name].model(torch.tensor([ids])).last_hidden_state[0, -1]
            return float(models[name].score(hidden))

    assert metrics[0]["reward_std"] > 0
    groups: dict[str, list[Any]] = {}
    for row in rollouts:
        groups.setdefault(row["group"], []).append(row)
    for rows in groups.values():
        assert [row["reward"] for row in rows] == pytest.approx([score("quality", row) for row in rows], abs=1e-4)
        mixed = [row["reward"] + 0.5 * score("style", row) for row in rows]
        mean = sum(mixed) / len(mixed)
        std = math.sqrt(sum((value - mean) ** 2 for value in mixed) / len(mixed))
        for row, value in zip(rows, mixed, strict=True):
            assert row["advantages"][0] == pytest.approx((value - mean) / (std + 1e-5), abs=1e-3)


def test_self_play(run: Any) -> None:
    shown, metrics, rollouts, _ = run("self_play")
    assert "rival.generate" in shown
    for line in metrics:
        [dropped] = [value for name, value in line.items() if name.startswith("samples/excluded/")]
        assert dropped == PROMPTS * 3, "the rival's answers, and no other"
    kept = [row for row in rollouts if not row["excluded"]]
    for row in kept:
        assert row["reward"] * 6 == pytest.approx(round(row["reward"] * 6)), "wins and half wins against three answers"
    groups = {row["group"] for row in kept}
    assert len(groups) == STEPS * PROMPTS


def test_tree_search(run: Any) -> None:
    shown, metrics, rollouts, _ = run("tree_search")
    assert "search.rollout" in shown
    for line in metrics:
        assert line["mismatch/prob_diff_mean"] < 1e-4, "the tokens of all rounds, as they were sampled"
    lengths = [len(row["token_ids"]) for row in rollouts]
    assert max(lengths) == 12, "three rounds of four tokens"
    assert all(length <= 12 for length in lengths)


def test_advantage_weighted(run: Any) -> None:
    shown, metrics, rollouts, run_dir = run("advantage_weighted")
    assert "generator.generate" in shown
    with (run_dir / "metrics.csv").open() as stream:
        header, *rows = csv.reader(stream)
    assert header == ["step", "reward", "policy/weighted_nll"]
    assert [[int(row[0]), *map(float, row[1:])] for row in rows] == [
        [line["step"], line["reward"], line["policy/weighted_nll"]] for line in metrics
    ]
    # The loss of the first step from its rollouts: one update, with the weights that sampled.
    first = [row for row in rollouts if row["step"] == 1]
    rewards: dict[str, list[float]] = {}
    for row in first:
        rewards.setdefault(row["group"], []).append(row["reward"])
    total = tokens = 0.0
    for row in first:
        own = rewards[row["group"]]
        weight = min(20.0, math.exp((row["reward"] - sum(own) / len(own)) / 0.1))
        total -= weight * sum(row["generator_logprobs"])
        tokens += len(row["token_ids"])
    assert metrics[0]["policy/weighted_nll"] == pytest.approx(total / tokens, rel=1e-4)
    assert metrics[0]["policy/loss"] == pytest.approx(total / tokens, rel=1e-4)
