"""Flows that extend, apply a function, join groups and score given tokens, on real engines."""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_data.arithmetic import problems, prompt_records
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_testing.leftovers import wait_until_empty

pytestmark = pytest.mark.engine

HINT = (7, 11, 13)
"""That of ``flow_players``."""
TURN, GROUP, PROMPTS, STEPS = 6, 2, 2, 2
WAIT_S = 10.0
MISMATCH = 1e-4
"""Largest difference of a logprob in float32: both sides read the same weights."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 97 / 97  # differs within every group
"""


@pytest.fixture(autouse=True)
def players_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def trained(directory: Path, algorithm: str, generator: dict[str, Any]) -> tuple[list[dict[str, Any]], Path]:
    """The lines of metrics of a run on this generator, and its directory."""
    model = build_tiny_model(directory / "model", hidden=128, layers=2)
    rows = list(prompt_records(problems(), "train", PROMPTS * STEPS, 7))
    data, reward = directory / "prompts.jsonl", directory / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    records = [{"id": row["id"], "prompt": row["prompt"][0]["content"], "ground_truth": "7"} for row in rows]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    sampler = {"kind": "generator", "device": "cpu", **generator}
    trainer = {
        "kind": "trainer",
        "backend": "fsdp",
        "device": "cpu",
        "options": {"learning_rate": 1e-2, "num_threads": 1},  # large steps: stale weights would show
    }
    text = yaml.safe_dump(
        {
            "output_dir": str(directory / "run"),
            "model": {"path": str(model)},
            "data": {"train": [{"path": str(data), "format": "prompt"}], "apply_chat_template": False},
            "algorithm": {"name": algorithm, "options": {"group_size": GROUP}},
            "roles": {
                "trainer": trainer,
                "generator": sampler,
                "rival": sampler,
                "reward": {"kind": "reward", "backend": "function", "options": {"path": f"{reward}:compute_score"}},
            },
            "sampling": {"max_tokens": TURN},
            "train": {"steps": STEPS, "prompts_per_step": PROMPTS},
            "checkpoint": {"export": False},
            "log": {"progress": False},
        }
    )
    flow_players = importlib.import_module("flow_players")
    registry = discover_plugins(extra=[PluginSource("flows", "flow-players", "1", lambda: flow_players.Algorithms)])
    before = set(threading.enumerate())
    asyncio.run(Run(assemble(load_config(text, [], registry), registry)).train("never"))
    left = wait_until_empty(
        lambda: [
            thread.name
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith(("executor-flow_players", "flow-functions"))
        ],
        WAIT_S,
    )
    assert not left, f"threads of the flow's functions outlive the run: {left}"
    lines = (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], directory / "run"


def assert_trains(metrics: list[dict[str, Any]], run_dir: Path) -> list[dict[str, Any]]:
    """Every sampled token is trained on with the logprob that the trainer's own forward gives it, and no other token
    is; groups hold both players.

    Returns:
        The journal's line of each sample.
    """
    assert len(metrics) == STEPS
    for line in metrics:
        assert line["samples/trained"] == PROMPTS * (GROUP + 1)
        assert line["mismatch/logprob_diff_max"] < MISMATCH
        assert line["rollout/staleness_max"] == 0
    assert metrics[0]["policy/grad_norm"] > 0, "nothing was learned, so nothing was shown"
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    rows = [json.loads(text) for file in files for text in file.read_text(encoding="utf-8").splitlines()]
    groups = Counter((row["step"], row["group"]) for row in rows)
    assert list(groups.values()) == [GROUP + 1] * PROMPTS * STEPS, groups
    hinted = 0
    for row in rows:
        tokens, hint = row["token_ids"], list(HINT)
        sampled = [True] * len(tokens)
        if len(tokens) > TURN or tokens[-len(hint) :] == hint:  # two turns and what was put between them
            start = next(i for i in range(len(tokens)) if tokens[i : i + len(hint)] == hint)
            sampled[start : start + len(hint)] = [False] * len(hint)
            hinted += 1
        for name in ("generator_logprobs", "trainer_logprobs"):
            assert [value != 0.0 for value in row[name]] == sampled, f"{name} of {row['id']}"
        assert not any(row["advantages"][at] for at, is_sampled in enumerate(sampled) if not is_sampled), row["id"]
    assert hinted == PROMPTS * GROUP * STEPS, "each of the policy's samples has two turns, and none of the rival's"
    return rows


def assert_rescored(rows: list[dict[str, Any]]) -> None:
    """The rival's tokens, too, which the scoring generator never sampled, have the trainer's logprobs."""
    for row in rows:
        assert row["generator_score_logprobs"] == pytest.approx(row["trainer_logprobs"], abs=MISMATCH), row["id"]


def test_flows_on_transformers(tmp_path: Path) -> None:
    assert_rescored(assert_trains(*trained(tmp_path, "rescored_players", {"backend": "transformers"})))


@pytest.mark.slow
def test_flows_on_vllm(tmp_path: Path) -> None:
    generator = {
        "backend": "vllm",
        "options": {"host": "child", "num_threads": 1},
        "engine": {"kv_cache_memory_bytes": 64 << 20},
    }
    assert_rescored(assert_trains(*trained(tmp_path, "rescored_players", generator)))
