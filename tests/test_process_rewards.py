"""Rewards of steps through a whole run: a reward model scores every step, and GRPO learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def stepwise(recipe: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GRPO with process supervision; each word is a step, and a random reward model scores it."""
    from transformers import AutoTokenizer

    from chatlearn_hf.tiny import build_tiny_model

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path_factory.mktemp("models")
    scorer = build_tiny_model(folder / "scorer", hidden=32, intermediate=64, seed=6, tie=False, tokenizer=tokenizer)
    content = recipe.content
    content["roles"]["scorer"] = {
        "kind": "trainer",
        "backend": "fsdp",
        "head": "reward",
        "model": {"path": str(scorer)},
    }
    content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "process",
        "uses": {"model": "scorer"},
        "options": {"rule": "model", "delimiter": "e"},
    }
    content["algorithm"]["options"] = {**content["algorithm"].get("options", {}), "supervision": "process"}
    content["train"]["steps"] = 1
    recipe.write()
    return recipe


def metrics_of(run_dir: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return dict(lines[-1])


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.thorough)])
def test_rewards_of_steps_reach_the_policy(stepwise: Any, chatlearn: Any, runtime: str) -> None:
    stepwise.content["runtime"] = {"backend": runtime, "options": {"num_threads": 1}}
    finished = chatlearn("run", stepwise.write())
    assert finished.code == 0, finished.output
    last = metrics_of(stepwise.run_dir)
    assert last["reward_steps"] >= 1
    assert last["policy/grad_norm"] > 0
    assert last["zero_spread_groups"] < 1
    rows = [json.loads(line) for line in (stepwise.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} == {0.0}, "the completion itself has none"
    steps = sum(row["reward_components"]["steps"] for row in rows) / len(rows)
    assert steps == pytest.approx(last["reward_steps"])


def test_a_reward_without_steps_is_refused(stepwise: Any, chatlearn: Any) -> None:
    stepwise.content["roles"]["reward"] = {"kind": "reward", "backend": "letters"}
    finished = chatlearn("config", "validate", stepwise.write())
    assert finished.code == 2
    assert "is to learn from rewards of steps, and no part gives them (got 'letters')" in finished.output
