"""A package of a third party (``tests/probe_package``), built as a wheel and installed apart, adds with hooks alone
what the first-party packages add, and every run with it resumes bit-identically.

A run is killed with SIGKILL when a checkpoint is complete, and goes on. What it leaves is compared with what an
unkilled run leaves: the model, metrics without times, rollouts, totals, every file of the last checkpoint by its
checksum and the state in it, and the arrays of every batch that a trainer was given.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from chatlearn_hf.model_directory import load_tokenizer
from chatlearn_hf.plain_forward import load_plain_model
from chatlearn_testing.recorded_batches import recorded_batches

pytestmark = pytest.mark.engine


@pytest.fixture
def chatlearn(chatlearn: Any, site: Path, probe_package: Path) -> Any:
    """The command line where the package is installed."""
    path = os.pathsep.join(map(str, (site, probe_package)))
    return lambda *argv, **settings: chatlearn(*argv, **{"PYTHONPATH": path} | settings)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def checkpoint(run_dir: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files by their checksums, and state without the configuration, whose paths differ."""
    content = json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "checkpoint.json").read_text())
    return content["files"], {name: value for name, value in content["state"].items() if name != "config"}


@pytest.fixture
def resumes(recipe: Any, chatlearn: Any, result_of: Any) -> Callable[..., Path]:
    """``resumes(killed_after)``: make the run whole and make it in two parts; both leave the same. The whole one's
    directory.
    """

    def compare(killed_after: int, *settings: str) -> Path:
        recipe.write()
        whole, parts = recipe.file.parent / "whole", recipe.file.parent / "parts"
        finished = chatlearn("run", recipe.file, *settings, f"output_dir={whole}")
        assert finished.code == 0, finished.output
        killed = chatlearn("run", recipe.file, *settings, f"output_dir={parts}", PROBE=f"saved:{killed_after}")
        assert killed.code == -signal.SIGKILL, killed.output
        resumed = chatlearn("run", recipe.file, *settings, f"output_dir={parts}")
        assert resumed.code == 0, resumed.output
        assert f"resuming after step {killed_after}" in resumed.output
        expected = result_of(whole)
        assert result_of(parts) == expected
        last = expected.metrics[-1]["step"]
        assert last > killed_after
        assert checkpoint(parts, last) == checkpoint(whole, last)
        found, wanted = recorded_batches(parts / "record"), recorded_batches(whole / "record")
        assert found.keys() == wanted.keys()
        for name, arrays in wanted.items():
            assert found[name].keys() == arrays.keys()
            for key, values in arrays.items():
                np.testing.assert_array_equal(found[name][key], values, strict=True, err_msg=f"{name}, {key}")
        return whole

    return compare


STUDENT: dict[str, Any] = {
    "kind": "trainer",
    "backend": "margin",
    "options": {"learning_rate": 0.01, "record": "${output_dir}/record"},
}
PEN = {"kind": "generator", "backend": "transformers"}
TASTE = {"kind": "reward", "backend": "vowels"}


def pieces(recorded: Mapping[str, Any], key: str) -> list[Any]:
    """The rows of per-token data of each sequence of a recorded batch."""
    return np.split(recorded[key], recorded["cu_seqlens"][1:-1])


def test_two_learners_with_schedules_of_their_own_and_an_output_of_the_package(
    recipe: Any, resumes: Any, tiny_model: Path
) -> None:
    recipe.content |= {
        "algorithm": {"name": "appraised", "options": {"target_margin": 0.6}},
        "schedules": [
            {"setting": "algorithm.options.margin_coef", "name": "halving", "options": {"start": 2.0, "every": 2}}
        ],
        "roles": {
            "student": STUDENT,
            "appraiser": {"kind": "trainer", "backend": "fsdp", "head": "value", "options": {"learning_rate": 0.01}},
            "pen": PEN,
            "taste": TASTE,
        },
        "train": {"steps": 4, "prompts_per_step": 4},
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    run_dir = resumes(2)
    made = lines(run_dir)
    assert [line["training/updates"] for line in made] == [2, 3, 3, 3], (
        "two epochs of the appraiser, one of the student"
    )
    appraisers = [checkpoint(run_dir, step)[0]["roles/appraiser/weights.safetensors"]["sha256"] for step in range(1, 5)]
    assert len(set(appraisers)) == 4
    before = load_file(tiny_model / "model.safetensors")
    for step, learned in ((1, False), (2, True)):
        after = load_file(run_dir / "checkpoints" / f"step_{step:08d}" / "roles" / "student" / "weights.safetensors")
        assert any(not torch.equal(after[name], before[name]) for name in before) == learned

    batches = list(recorded_batches(run_dir / "record").values())
    assert len(batches) == 3, "one for each update of the student"
    # Steps 1 and 2 compute with the weights of the start: a plain forward gives the margin of each token.
    plain = load_plain_model(tiny_model)
    for ids, mask, margins in zip(
        *(pieces(batches[0], key) for key in ("token_ids", "loss_mask", "token_data/student_margin")), strict=True
    ):
        top = plain(torch.from_numpy(ids)).log_softmax(-1).topk(2).values[:-1]
        expected = np.concatenate([[0.0], (top[:, 0] - top[:, 1]).detach().numpy()]) * mask
        np.testing.assert_allclose(margins, expected, atol=1e-4)
        assert (margins[mask] > 0).all()
    # The loss at the student's first look at a batch, where its ratio is 1: by the schedule, the state and the output.
    price = 1.0
    for step, line in enumerate(made, start=1):
        if step > 1:
            batch, coefficient = batches[step - 2], price * 2.0 * 0.5 ** ((step - 1) // 2)
            mask = batch["loss_mask"]
            advantages = batch["token_data/advantages"][mask].astype(np.float64)
            margins = batch["token_data/student_margin"][mask].astype(np.float64)
            assert line["policy/loss"] == pytest.approx(coefficient * margins.mean() - advantages.mean(), abs=1e-5)
            assert line["appraised/margin"] == pytest.approx(margins.mean(), rel=1e-6)
        price *= 1.25 if line["appraised/margin"] > 0.6 else 0.8
    assert checkpoint(run_dir, 4)[1]["algorithm"] == {"price": pytest.approx(price)}


def test_pairs_without_a_generator_are_learned_and_evaluated(
    recipe: Any, resumes: Any, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"what is {i} plus 1?", "chosen": f" it is {i + 1}", "rejected": f" {i} and a half"}
        for i in range(12)
    ]
    for name, part in (("train", rows[:8]), ("held_out", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    pupil = STUDENT | {"options": STUDENT["options"] | {"learning_rate": 2e-4}}
    recipe.content |= {
        "data": {
            "train": [{"path": str(tmp_path / "train.jsonl"), "format": "preference"}],
            "eval": [{"path": str(tmp_path / "held_out.jsonl"), "format": "preference"}],
            "apply_chat_template": False,
        },
        "algorithm": {"name": "pairwise", "options": {"beta": 0.5}},
        "roles": {"pupil": pupil, "anchor": {"kind": "trainer", "backend": "fsdp"}},
        "train": {"steps": 4, "prompts_per_step": 4, "mini_batches": 2},
        "eval": {"every": 2},
    }
    run_dir = resumes(1)
    evaluated = {line["step"]: line for line in lines(run_dir) if "eval/loss" in line}
    assert list(evaluated) == [0, 2, 4]
    assert evaluated[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6), "pupil and anchor are equal"
    assert evaluated[4]["eval/loss"] < evaluated[2]["eval/loss"] < evaluated[0]["eval/loss"]
    tokenizer = load_tokenizer(str(tiny_model))
    pupil, anchor = load_plain_model(run_dir / "model"), load_plain_model(tiny_model)
    gains: dict[str, list[float]] = {}
    for text in (run_dir / "rollouts" / "eval_000004.jsonl").read_text().splitlines():
        row = json.loads(text)
        prompt = tokenizer.encode(row["prompt"])
        ids = torch.tensor([*prompt, *row["token_ids"]])
        sums = []
        for model in (pupil, anchor):
            chosen = model(ids).log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
            sums.append(float(chosen[len(prompt) - 1 :].detach().double().sum()))
        gains.setdefault(row["group"], []).append(sums[0] - sums[1])
    expected = [math.log1p(math.exp(-0.5 * (better - worse))) for better, worse in gains.values()]
    assert len(expected) == 4
    assert evaluated[4]["eval/loss"] == pytest.approx(sum(expected) / 4, abs=1e-4)
    batches = recorded_batches(run_dir / "record").values()
    assert all(sorted(batch["sequence_data/rank"].tolist()) == [0, 0, 1, 1] for batch in batches), "no pair is torn"


def test_a_flow_of_two_rounds_with_a_function_between_them(recipe: Any, resumes: Any, tiny_model: Path) -> None:
    roles = {"policy": "student", "generator": "pen", "reward": "taste"}
    recipe.content |= {
        "algorithm": {"name": "rounds", "options": {"group_size": 3, "remark": 40, "roles": roles}},
        "roles": {"student": STUDENT, "pen": PEN, "taste": TASTE},
        "sampling": {"max_tokens": 5},
        "train": {"steps": 3, "prompts_per_step": 3},
    }
    run_dir = resumes(1)
    for line in lines(run_dir):
        assert line["samples/trained"] == 9
        assert line["mismatch/prob_diff_mean"] < 1e-4, "the generator's logprobs of three turns are the trainer's"
    tokenizer = load_tokenizer(str(tiny_model))

    def share(turns: Sequence[Any]) -> float:
        text = "".join(tokenizer.decode(turn, skip_special_tokens=True) for turn in turns)
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    for batch in recorded_batches(run_dir / "record").values():
        groups: dict[str, list[tuple[list[float], list[int]]]] = {}
        starts = batch["num_prompt_tokens"]
        sequences = zip(
            batch["sample_ids"], starts, pieces(batch, "token_ids"), pieces(batch, "loss_mask"), strict=True
        )
        for sample_id, start, ids, mask in sequences:
            places = [int(place) for place in np.flatnonzero(~mask) if place >= start]
            assert len(places) == 2
            turns = [ids[start : places[0]], ids[places[0] + 1 : places[1]], ids[places[1] + 1 :]]
            assert 1 <= len(turns[0]) <= 5
            assert all(1 <= len(turn) <= 3 for turn in turns[1:])
            shares = [share(turns[:1]), share(turns[:2])]
            groups.setdefault(sample_id.partition("#")[0], []).append((shares, ids[places].tolist()))
        for members in groups.values():
            for number in range(2):
                best = max(shares[number] for shares, _ in members)
                for shares, remarks in members:
                    assert remarks[number] == (40 if shares[number] == best else 41)


def test_an_environment_of_two_turns_with_decisions_of_the_package(recipe: Any, resumes: Any) -> None:
    dictated, roles = 3, {"policy": "student", "environment": "desk", "reward": None}
    recipe.content["data"]["train"][0]["limit"] = 6
    recipe.content["data"]["sampler"] = {"name": "weakest"}
    recipe.content |= {
        "algorithm": {"name": "grpo", "options": {"group_size": 3, "roles": roles}},
        "roles": {
            "student": STUDENT,
            "pen": PEN,
            "desk": {
                "kind": "environment",
                "backend": "dictation",
                "uses": {"pen": "pen"},
                "options": {"dictated": dictated},
            },
        },
        "sampling": {"max_tokens": 4},
        "rollout": {"filters": [{"name": "thinned", "options": {"every": 5}}]},
        "train": {
            "steps": 9,
            "prompts_per_step": 4,
            "step_policies": [{"name": "token_budget", "options": {"tokens": 900}}],
        },
    }
    run_dir = resumes(1)
    made = lines(run_dir)
    # Twelve samples a step; of 36 the numbers 5, 10, ... are left out, counted on over steps and over the resume.
    assert [line["samples/excluded/thinned"] for line in made] == [2, 2, 3]
    used = np.cumsum([line["perf/trained_tokens"] for line in made])
    assert [line["budget/used"] for line in made] == used.tolist()
    assert used[-2] < 900 <= used[-1], "it stops where the budget ends, long before the last step"
    # What is drawn: the six examples in their order, then those with the lowest mean reward.
    rewards: dict[str, float] = {}
    order = [f"sums/{i}" for i in range(6)]
    for step in range(1, len(made) + 1):
        rows = [json.loads(text) for text in (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        drawn = list(dict.fromkeys(row["group"].partition("@")[0] for row in rows))
        expected = sorted(order, key=lambda name: (rewards.get(name, -math.inf), order.index(name)))
        assert drawn == expected[:4]
        for name in drawn:
            own = [row["reward"] for row in rows if row["group"].partition("@")[0] == name]
            rewards[name] = sum(own) / len(own)
    for batch in recorded_batches(run_dir / "record").values():
        keys = ("token_ids", "loss_mask", "token_data/policy_version", "token_data/generator_logprobs")
        for start, ids, mask, versions, logprobs in zip(
            batch["num_prompt_tokens"], *(pieces(batch, key) for key in keys), strict=True
        ):
            said = np.flatnonzero(~mask)[start:]
            np.testing.assert_array_equal(said, np.arange(said[0], said[0] + dictated))
            np.testing.assert_array_equal(ids[said], ids[:dictated])
            assert mask[start : said[0]].all()
            assert mask[said[-1] + 1 :].all()
            assert len(ids) > said[-1] + 1, "the policy has a second turn"
            np.testing.assert_array_equal(versions >= 0, mask)
            np.testing.assert_array_equal(logprobs < 0, mask)
