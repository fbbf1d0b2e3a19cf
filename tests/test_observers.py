"""Observers change no results, whatever they do to the objects they receive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def untimed(file: Path) -> dict[str, Any]:
    """A run's summary without clock, paths and names."""
    content = json.loads(file.read_text())
    return {name: value for name, value in content.items() if name not in ("wall_s", "model", "checkpoint")}


def test_an_observer_that_changes_all_it_is_given_changes_nothing(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    """``meddle`` of the probe plugin clears mappings and lists, zeroes arrays, sets attributes, and seeds anew."""
    watched, meddled = recipe.file.parent / "watched", recipe.file.parent / "meddled"
    for run_dir, settings in ((watched, {}), (meddled, {"PROBE_MEDDLE": "1"})):
        finished = chatlearn("run", recipe.file, "train.steps=2", f"output_dir={run_dir}", **settings)
        assert finished.code == 0, finished.output
        assert "raised" not in finished.output, finished.output
    assert result_of(meddled) == result_of(watched)
    assert untimed(meddled / "summary.json") == untimed(watched / "summary.json")
    config = (watched / "config.yaml").read_text().replace(str(watched), str(meddled))
    assert (meddled / "config.yaml").read_text() == config
