"""``benchmarks/learning.py`` covers every algorithm with a valid configuration, and judges runs as its recipes ask."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_algorithms.plugin import chatlearn_algorithms
from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble_flow
from chatlearn_core.plugins.loader import discover_plugins

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def learning() -> Any:
    """The program, as a module."""
    spec = importlib.util.spec_from_file_location("learning", BENCHMARKS / "learning.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "learning", module)
        spec.loader.exec_module(module)
        yield module


def test_every_algorithm_has_a_valid_recipe(learning: Any, tmp_path: Path) -> None:
    names = {spec.name for spec in chatlearn_algorithms()} - {"sft"}  # which makes the warm start
    assert names <= set(learning.RECIPES)
    registry = discover_plugins()
    for name in learning.RECIPES:
        text = yaml.safe_dump(learning.configuration(name, 0, tmp_path))
        assert assemble_flow(load_config(text, (), registry), registry).plan.roles, name


@pytest.mark.parametrize(
    ("result", "met"),
    [
        ({"before": 0.5, "after": 0.56}, True),
        ({"before": 0.5, "after": 0.54}, False),
        ({"before": 0.5, "after": 0.56, "pairs": [0.5, 0.8], "margin": [0.0, 0.1]}, True),
        ({"before": 0.5, "after": 0.56, "pairs": [0.5, 0.6], "margin": [0.0, 0.1]}, False),
        ({"pairs": [0.5, 0.8], "margin": [0.0, -0.1]}, False),
        ({"pairs": [0.9, 0.8], "margin": [0.0, 0.1]}, False),
    ],
)
def test_what_a_recipe_asks_for(learning: Any, result: dict[str, Any], met: bool) -> None:
    recipe = learning.Recipe(gain=0.05, of_pairs=0.7)
    assert learning.is_met(recipe, result) == met


def test_the_table_shows_spread_and_what_was_not_run(learning: Any) -> None:
    runs = [{"name": "grpo", "seed": i, "before": 0.4, "after": 0.6 + i / 10, "met": True} for i in range(3)]
    lines = learning.table(runs).splitlines()
    assert "| `grpo` | 3 | 40% | 70% (60% .. 80%) | +10 points |  |  | 3 of 3 |" in lines
    assert "| `dpo` | not run | | | | | | |" in lines


def test_a_run_counts_once_its_answers_are_judged(learning: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "ipo-1"
    run_dir.mkdir()
    (tmp_path / "sft").mkdir()
    change = {"eval/accuracy": {"before": 0.0, "after": 0.7}, "eval/margin": {"before": 0.0, "after": 0.5}}
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed", "wall_s": 12.34} | change))
    (run_dir / "made.json").write_text(json.dumps({"commit": "abc", "date": "2026-01-02"}))
    assert learning.result_of("ipo", 1, tmp_path) is None
    (tmp_path / "sft" / learning.HELDOUT_FILE).write_text("0.4")
    (run_dir / learning.HELDOUT_FILE).write_text("0.5")
    expected = {"pairs": [0.0, 0.7], "margin": [0.0, 0.5], "before": 0.4, "after": 0.5, "met": True}
    made = {"name": "ipo", "seed": 1, "wall_s": 12.3, "commit": "abc", "date": "2026-01-02"}
    assert learning.result_of("ipo", 1, tmp_path) == made | expected
    assert learning.result_of("kto", 1, tmp_path) is None


def test_pairs_are_of_different_completions_right_and_wrong(learning: Any, tmp_path: Path) -> None:
    rollouts = tmp_path / "sampled" / "rollouts"
    rollouts.mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "sampled" / "summary.json").write_text(json.dumps({"status": "completed"}))
    prompts = [{"id": name, "prompt": name} for name in ("a", "b", "c")]
    (tmp_path / "data" / "to_pair.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    sampled = [("a", 1.0, "2"), ("a", 1.0, "2"), ("a", 0.0, "3"), ("a", 0.0, "4"), ("a", 1.0, "1 + 1 = 2")]
    sampled += [("b", 1.0, "5"), ("b", 1.0, "5."), ("c", 0.0, "6"), ("c", 1.0, "7"), ("c", 0.0, "8"), ("c", 0.0, "")]
    rows = [{"group": f"{name}@0", "reward": reward, "completion": text} for name, reward, text in sampled]
    (rollouts / "step_000001.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert list(learning.sampled_pairs(tmp_path, "to_pair", tmp_path / "sampled")) == [
        {"prompt": "a", "chosen": "2", "rejected": "3", "id": "a/0"},
        {"prompt": "a", "chosen": "1 + 1 = 2", "rejected": "4", "id": "a/1"},
        {"prompt": "c", "chosen": "7", "rejected": "6", "id": "c/0"},
        {"prompt": "c", "chosen": "7", "rejected": "8", "id": "c/1"},
    ]


def test_the_plot_shows_every_seed(learning: Any) -> None:
    runs = [{"name": "grpo", "seed": i, "before": 0.4, "after": 0.6 + i / 10, "met": i > 0} for i in range(2)]
    svg = learning.plot(runs)
    for colour in ("#1f4e79", "#c0392b"):  # one of each in the legend
        assert len(re.findall(f'<circle [^>]*fill="{colour}"', svg)) == 2
    assert ">65%</text>" in svg
    assert learning.plot([]).endswith("</svg>\n")


def test_what_a_recipe_needs_runs_in_an_earlier_stage(learning: Any) -> None:
    assert learning.stages(["ppo_reward_model", "dpo"]) == [["grpo", "dpo"], ["reward_model"], ["ppo_reward_model"]]
    config = learning.configuration("reward_model", 3, Path("runs"))
    assert [Path(one["path"]).name for one in config["data"]["train"]] == ["pairs.jsonl", "grpo_pairs-3.jsonl"]
