"""A failed run leaves one page for the user that says what happened and how to continue."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


def page_of(recipe: Any, finished: Any) -> str:
    """The page, which the terminal names; there is no traceback beside it."""
    assert finished.code == 2, finished.output
    file: Path = recipe.run_dir / "failure.md"
    assert f"What happened, and how to continue: {file}" in finished.output
    assert "Traceback (most recent call last)" not in finished.output
    text = file.read_text()
    assert "## How to continue" in text
    assert "## Versions" in text
    assert "chatlearn-core" in text
    assert len(text) < 12_000, "one page"
    return text


def test_a_generator_that_dies_too_often(recipe: Any, chatlearn: Any) -> None:
    page = page_of(recipe, chatlearn("run", recipe.file, PROBE="engine:17", PROBE_DEATHS="99"))
    assert page.startswith("# Run 'test' failed while generating, step 2 of 4")
    assert "| error | ReplicaLostError |" in page
    assert "the engine process was killed" in page
    for number in (1, 2):
        assert (
            f"**replica_rebuilt** (step 2): role 'generator': replica 0 died and is rebuilt (restart {number}" in page
        )
    assert f"A checkpoint of step 1 is in {recipe.run_dir / 'checkpoints'}." in page
    events = [json.loads(line) for line in (recipe.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] == "replica_rebuilt"] == ["replica_rebuilt"] * 2
    resumed = chatlearn("run", recipe.run_dir / "config.yaml")  # as the page says
    assert resumed.code == 0, resumed.output
    assert "resuming after step 1" in resumed.output
    assert not (recipe.run_dir / "failure.md").exists()


def test_a_trainer_that_hangs_shows_where(recipe: Any, chatlearn: Any) -> None:
    recipe.content["roles"]["trainer"]["timeout_s"] = 8.0
    recipe.write()
    page = page_of(recipe, chatlearn("run", recipe.file, PROBE="hang:9"))
    assert page.startswith("# Run 'test' failed while updating, step 3 of 4")
    assert "role 'trainer': update did not return within 8 s (roles.trainer.timeout_s)" in page
    assert "| role | trainer |" in page
    assert "time.sleep(600)" in page[page.index("## Where it was, in the worker") :]
    assert "A checkpoint of step 2 is in" in page


def test_a_trainer_that_raises_shows_its_traceback(recipe: Any, chatlearn: Any) -> None:
    page = page_of(recipe, chatlearn("run", recipe.file, PROBE="out of memory:1"))
    assert page.startswith("# Run 'test' failed while updating, step 1 of 4")
    assert "role 'trainer': update failed: RuntimeError: out of memory" in page
    assert 'raise RuntimeError("out of memory")' in page
    assert "No step was complete yet, so it starts from the beginning." in page


def test_a_reward_that_never_works(recipe: Any, chatlearn: Any) -> None:
    recipe.content["roles"]["reward"]["backend"] = "raising"
    recipe.write()
    page = page_of(recipe, chatlearn("run", recipe.file))
    assert "all 12 samples of step 1 failed" in page
    assert "KeyError: 'answer'" in page


def test_what_is_wrong_before_a_run_begins_is_only_told(recipe: Any, chatlearn: Any) -> None:
    refused = chatlearn("run", recipe.file, "train.steps=0")
    assert refused.code == 2
    assert not (recipe.run_dir / "failure.md").exists()


def test_an_interrupted_run_has_not_failed(recipe: Any, chatlearn: Any) -> None:
    stopped = chatlearn("run", recipe.file, PROBE="update:3", PROBE_SIGNAL=str(int(signal.SIGINT)))
    assert stopped.code == 130, stopped.output
    assert not (recipe.run_dir / "failure.md").exists()
