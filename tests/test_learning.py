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
DOCS = BENCHMARKS.parent / "docs"


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
    made = {"date": "2026-01-02", "tree": "abc", "recipe": learning.recipe_hash("grpo")}
    runs = [{"name": "grpo", "seed": i, "before": 0.4, "after": 0.6 + i / 10, "met": True, **made} for i in range(3)]
    lines = learning.table(runs).splitlines()
    assert "| `grpo` | 3 | 40% | 70% (60% .. 80%) | +10 points |  |  | 3 of 3 | 2026-01-02, abc |" in lines
    assert "| `dpo` | not run | | | | | | | |" in lines
    changed = learning.table([runs[0] | {"recipe": "other", "tree": ""}])
    assert f"| 1 of 1 | 2026-01-02, tree not recorded ({learning.CHANGED}) |" in changed


def test_the_document_shows_the_recorded_runs_and_which_recipes_changed(learning: Any) -> None:
    record = json.loads((BENCHMARKS / "results" / "learning.json").read_text())
    shown = learning.table(record["runs"])
    assert shown in (DOCS / "algorithms.md").read_text(), "put the table of benchmarks/learning.py into the document"
    assert learning.plot(record["runs"]) == (DOCS / "learning.svg").read_text()
    for run in record["runs"]:
        [row] = [line for line in shown.splitlines() if line.startswith(f"| `{run['name']}` |")]
        assert (learning.CHANGED in row) == (run["recipe"] != learning.recipe_hash(run["name"])), run["name"]


def test_a_recipe_is_recorded_by_what_it_sets(learning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the recipe that it needs; not by its name, or by defaults."""
    assert learning.recipe_hash("dpo") == learning.recipe_hash("ipo") != learning.recipe_hash("simpo")
    before = learning.recipe_hash("distillation")
    changed = learning.replace(learning.RECIPES["grpo"], steps=21)
    monkeypatch.setitem(learning.RECIPES, "grpo", changed)
    assert learning.recipe_hash("distillation") != before


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
