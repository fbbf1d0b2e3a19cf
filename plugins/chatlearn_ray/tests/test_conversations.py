"""The driver of an asynchronous run dies between two checkpoints, with conversations in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from chatlearn_core.executor.array_state import read_array_state
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.rollouts.saved import FILE
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, bigram_logits, read_bigram_tensors

from .fault_run import FAULT_STEP, STEPS
from .test_fault_grid import Scene, check_kills, check_weights, killed_driver
from .test_fault_grid import scene as scene

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TURNS, BROKEN = 3, "p7@0#3"
SETTINGS = (
    "rollout.max_staleness=2",
    f"roles.desk.options.num_turns={TURNS}",
    "roles.desk.options.seconds_per_rollout=0.05",
    f"roles.desk.options.broken={BROKEN}",
    "roles.generator.options.seconds_per_token=0.02",
    "roles.trainer.options.learning_rate=3.0",  # the logprobs of two versions differ
)
MISMATCH = 1e-4
"""Largest difference of a logprob; those in ``rollouts/`` are rounded."""


async def test_conversations_in_flight_go_on_after_the_driver_was_killed(
    scene: Scene, ray_session: None, cluster: Any, leaves_nothing: object
) -> None:
    """What a checkpoint holds of them is not sampled again. Each is trained on once, or excluded; each token has the
    version and the logprob of the weights that sampled it.
    """
    cell = scene.cell("conversations", environment=True, mode="async")
    await killed_driver(cell, Phase.UPDATING, cluster, *SETTINGS)
    check_kills(cell, "driver", Phase.UPDATING)
    check_weights(cell, goes_back=True)
    versions = versions_of(cell.run_dir)
    check_went_on(in_flight(cell.run_dir / "checkpoints" / f"step_{FAULT_STEP - 1:08d}"), versions)

    rows = [row for step in range(1, STEPS + 1) for row in rollouts_of(cell.run_dir, step)]
    ids = [f"p{prompt}@0#{number}" for prompt in range(4 * STEPS) for number in range(4)]
    assert sorted(row["id"] for row in rows) == sorted(ids)
    [excluded] = [row for row in rows if row["excluded"]]
    assert excluded["id"] == BROKEN
    assert "the tool fails" in excluded["excluded"]
    totals = json.loads((cell.run_dir / "summary.json").read_text())["totals"]
    assert (totals["samples/trained"], totals["samples/excluded"]) == (len(ids) - 1, 1)

    weights = [weights_of_version(scene.model, cell.run_dir, version) for version in range(STEPS)]
    assert (weights[0][0] - weights[1][0]).abs().max() > 100 * MISMATCH, "a wrong version would show"
    tokenizer = AutoTokenizer.from_pretrained(scene.model)
    for row in rows:
        if not row["excluded"]:
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            turns = [versions[f"{row['id']}/{turn}"] for turn in range(TURNS)]
            assert all(row["step"] - 3 <= version < row["step"] for turn in turns for version, _ in turn)
            assert row["generator_logprobs"] == pytest.approx(
                expected_logprobs([*prompt, *row["token_ids"]], len(prompt), turns, weights), abs=MISMATCH
            )


def expected_logprobs(
    tokens: list[int], start: int, turns: list[list[tuple[int, int]]], weights: list[tuple[Tensor, Tensor]]
) -> list[float]:
    """Of the tokens from ``start`` on; 0 for the token of the tool between two turns.

    Args:
        tokens: of the prompt and all turns.
        start: number of prompt tokens.
        turns: for each, (version, stop) of its tokens.
        weights: of each version.
    """
    found: list[float] = []
    for turn in turns:
        found += [0.0] if found else []
        begin = start + len(found)
        for version, stop in turn:
            place = torch.arange(start + len(found), begin + stop)
            ids = torch.tensor(tokens)
            logprobs = bigram_logits(*weights[version], ids[place - 1]).log_softmax(-1)
            found += logprobs.gather(-1, ids[place, None])[:, 0].tolist()
    return found


def check_went_on(conversations: dict[str, dict[str, Any]], versions: dict[str, list[tuple[int, int]]]) -> None:
    """A checkpoint holds conversations that wait for the policy, and some for the tool. Tokens that it holds were kept.

    Args:
        conversations: sample -> request -> its completion in the checkpoint.
        versions: see ``versions_of``.
    """
    cut = set()
    for made in conversations.values():
        for request, completion in made.items():
            spans = [(version, stop) for _, stop, version in completion["version_spans"]]
            assert versions[request][: len(spans)] == spans, request
            if completion["finish_reason"] == "abort":
                cut.add(request)
                assert versions[request][-1][0] > spans[-1][0], "it went on with newer weights"
    assert any(made and len(made) < TURNS and not cut & made.keys() for made in conversations.values())
    assert any(len(made) > 1 and cut & made.keys() for made in conversations.values())


def rollouts_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step."""
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def versions_of(run_dir: Path) -> dict[str, list[tuple[int, int]]]:
    """Request -> (version, stop) of its tokens; of one that was made again, the last record counts."""
    lines = [json.loads(line) for line in (run_dir / "admissions.jsonl").read_text().splitlines()]
    return {line["request"]: [(version, stop) for version, stop in line["ends"]] for line in lines if "request" in line}


def in_flight(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Sample -> request -> its completion, of conversations that had not ended."""
    groups = [group for group in read_array_state(checkpoint / FILE)["pending"] if not group.get("finished")]
    return {
        sample["id"]: {name: turn["completion"] for name, turn in sample["turns"].items()}
        for group in groups
        for sample in group["samples"]
    }


def weights_of_version(model: Path, run_dir: Path, version: int) -> tuple[Tensor, Tensor]:
    """Transition and bias, from the model or a checkpoint."""
    file = run_dir / "checkpoints" / f"step_{version:08d}" / "roles" / "trainer" / "weights.safetensors"
    tensors = load_file(file) if version else read_bigram_tensors(model)
    return tensors[TRANSITION], tensors[UNIGRAM]
