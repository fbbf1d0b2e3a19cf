"""Evaluation sets in a run, and ``chatlearn eval`` over its checkpoints, through the real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def two_sets(recipe: Any, sums: Path) -> Any:
    """Two steps of GRPO; half of the questions are also evaluated with a reward of their own, four samples each."""
    recipe.content["data"]["eval"] = [
        {"path": str(sums), "format": "prompt", "limit": 4, "name": "all"},
        {"path": str(sums), "format": "prompt", "limit": 2, "name": "few"},
    ]
    for row, dataset in enumerate(recipe.content["data"]["eval"]):
        file = recipe.file.parent / f"{dataset['name']}.jsonl"
        text = sums.read_text().splitlines()[10 * row :]
        file.write_text("\n".join(text))
        dataset["path"] = str(file)
    recipe.content["roles"]["strict"] = {"kind": "reward", "backend": "gsm8k"}
    recipe.content["eval"] = {
        "every": 1,
        "resamples": 100,
        "sets": {
            "hard": {
                "datasets": ["few"],
                "reward": "strict",
                "sampling": {"max_tokens": 6, "temperature": 1.0},
                "samples_per_prompt": 4,
            }
        },
    }
    recipe.content["train"] |= {"steps": 2, "mini_batches": 1, "epochs": 1}
    recipe.write()
    return recipe


def test_sets_have_their_own_reward_and_checkpoints_are_evaluated_as_in_the_run(two_sets: Any, chatlearn: Any) -> None:
    finished = chatlearn("run", two_sets.file)
    assert finished.code == 0, finished.output
    last = lines(two_sets.run_dir)[-1]
    assert last["eval/samples"] == 4
    assert last["eval/hard/samples"] == 8
    assert "eval/accuracy" not in last, "the reward of the flow counts letters"
    assert 0.0 <= last["eval/hard/pass@1"] == last["eval/hard/accuracy"] <= last["eval/hard/pass@4"]
    assert last["eval/reward/low"] <= last["eval/reward"] <= last["eval/reward/high"]

    # Every checkpoint measures what the run measured after that step: the same weights, prompts and random numbers.
    evaluated = chatlearn("eval", two_sets.file, "--checkpoints", "all", "--model", str(two_sets.run_dir / "model"))
    assert evaluated.code == 0, evaluated.output
    results = json.loads((two_sets.run_dir / "evaluation" / "metrics.json").read_text())["evaluations"]
    assert [one["step"] for one in results] == [1, 2, None]
    for one, line in zip(results, [*lines(two_sets.run_dir)[1:], last], strict=True):
        assert one["metrics"] == {name: value for name, value in line.items() if name.startswith("eval/")}
    assert {"metrics.csv", "metrics.svg"} <= {file.name for file in (two_sets.run_dir / "evaluation").iterdir()}
    assert "hard/pass@4" in evaluated.output

    refused = chatlearn("eval", two_sets.file, "--checkpoints", "all", "roles.trainer.options.learning_rate=0.5")
    assert refused.code != 0
    assert "belongs to a run with other settings" in refused.output
    unknown = chatlearn("eval", two_sets.file, "--checkpoints", "2", "--set", "hart")
    assert unknown.code == 2
    assert "Did you mean 'hard'?" in unknown.output
