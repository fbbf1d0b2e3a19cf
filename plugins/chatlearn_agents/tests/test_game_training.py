"""A step of GRPO whose rollouts are games, on the runtime ``local`` with the generator of transformers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GAME = '''
import gymnasium

class Letters(gymnasium.Env):
    """Three turns; each is worth the share of its characters that are letters."""

    action_space = gymnasium.spaces.Text(1000)
    observation_space = gymnasium.spaces.Text(10)

    def reset(self, *, seed=None, options=None):
        self.left = 3
        return "write", {}

    def step(self, action):
        self.left -= 1
        return "more", sum(map(str.isalpha, action)) / max(1, len(action)), self.left == 0, False, {}
'''


def test_a_step_of_grpo_trains_on_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letter_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"game {i}:"}) + "\n" for i in range(2)))
    content: dict[str, Any] = {
        "name": "test",
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(build_tiny_model(tmp_path / "model", hidden=32, intermediate=64))},
        "data": {
            "train": [{"path": str(tmp_path / "rows.jsonl"), "format": "prompt", "options": {"answer": "optional"}}]
        },
        "algorithm": {"name": "grpo", "options": {"group_size": 3, "roles": {"environment": "game", "reward": None}}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.003}},
            "generator": {"kind": "generator", "backend": "transformers"},
            "game": {
                "kind": "environment",
                "backend": "game",
                "uses": {"policy": "generator"},
                "options": {"make": "letter_game:Letters", "action": "text"},
            },
        },
        "sampling": {"max_tokens": 6},
        "train": {"steps": 1, "prompts_per_step": 2},
        "checkpoint": {"export": False},
        "log": {"progress": False},
        "runtime": {"options": {"num_threads": 1}},
    }
    registry = discover_plugins()
    run = Run(assemble(load_config(yaml.safe_dump(content), (), registry), registry), observers=registry.observers)
    assert asyncio.run(run.train())["status"] == "completed"
    [metrics] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["samples/trained"] == 6
    assert (metrics["environment/turns"], metrics["environment/ended"], metrics["environment/truncated"]) == (3, 1, 0)
    # The trainer's forward over whole games against what the generator said in each turn: other tokens, a shifted mask
    # or logprobs of observations would all show.
    assert metrics["mismatch/prob_diff_mean"] < 1e-4
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert metrics["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 6)
    assert all(row["reward"] == row["reward_components"]["return"] for row in rows), "the sum of the game's rewards"
    assert metrics["reward_std"] > 0, "there is something to learn"
    for row in rows:
        learned = [weight != 0.0 for weight in row["advantages"]]
        assert learned == [logprob != 0.0 for logprob in row["generator_logprobs"]], "on sampled tokens, and no others"
