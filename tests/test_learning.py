"""``benchmarks/learning.py`` covers every algorithm with a valid configuration, and judges runs as its recipes ask."""

from __future__ import annotations

import importlib.util
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
    assert "| `grpo` | 3 | 40% | 70% (60% .. 80%) | +5 points |  |  | 3 of 3 |" in lines
    assert "| `dpo` | not run | | | | | | |" in lines
