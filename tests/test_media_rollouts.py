"""Prompts with media, which the generator expands, and data of prompt and completion tokens: what reaches the trainer.

The generator is ``chatlearn_testing.fakes.media_generator``. The trainer writes down every batch that it is given, and
each number in it is compared with one that is computed here, token by token, from the rows of the data and the weights.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from chatlearn_testing.fake_environment import FakeEnvironment
from chatlearn_testing.fakes.bigram import TRANSITION, UNIGRAM, build_bigram_model
from chatlearn_testing.recorded_batches import recorded_batches

pytestmark = pytest.mark.engine

ROWS = {
    "before": ("lookatznow", ["00ff10"]),
    "two": ("zz", ["0102", "0a0b0c0d0e"]),
    "none": ("nopicturehere", []),
    "last": ("attheendz", ["fffefdfc"]),
    "alike": ("twicezthesamez", ["0707", "0707"]),
}
"""Prompt, where each z stands for a medium, and media in hex."""


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a distribution that registers the fakes."""
    environment = FakeEnvironment(tmp_path_factory.mktemp("fakes"))
    environment.install("media-fakes", entry_points="[chatlearn]\nfakes = chatlearn_testing.fakes.plugin\n")
    return environment.site


@pytest.fixture
def chatlearn(chatlearn: Any, site: Path, fakes: Path, probe_package: Path) -> Any:
    """The command line where fakes and probe package are installed."""
    path = os.pathsep.join(map(str, (site, fakes, probe_package)))
    return lambda *argv, **settings: chatlearn(*argv, **{"PYTHONPATH": path} | settings)


@pytest.fixture
def media(recipe: Any, tmp_path: Path) -> Any:
    """GRPO on prompts with media, with completions that go on over several steps."""
    rows = [{"id": name, "prompt": prompt, "media": media} for name, (prompt, media) in ROWS.items()]
    (tmp_path / "media.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.content |= {
        "model": {"path": str(build_bigram_model(tmp_path / "bigram"))},
        "data": {"train": [{"path": str(tmp_path / "media.jsonl"), "format": "fake_media"}]},
        "algorithm": {
            "name": "grpo",
            "options": {"group_size": 2, "importance_correction": "truncate", "importance_threshold": 5.0},
        },
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fake", "options": {"record": "${output_dir}/record"}},
            "generator": {"kind": "generator", "backend": "fake_media"},
            "reward": {"kind": "reward", "backend": "fake"},
        },
        "sampling": {"max_tokens": 12},
        "rollout": {"partial": "resume", "round_tokens": 3, "max_rounds": 4, "in_flight_prompts": 4},
        "train": {"steps": 5, "prompts_per_step": 2},
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    return recipe


def expanded(prompt: str, media: Sequence[str]) -> list[int]:
    """The tokens of a prompt: a letter each, and in place of a z those of the next medium, from its bytes."""
    left, tokens = list(media), []
    for letter in prompt:
        if letter == "z":
            tokens += [1 + byte % 25 for byte in bytes.fromhex(left.pop(0))]
        else:
            tokens.append(ord(letter) - ord("a") + 1)
    return tokens


def check_record(run_dir: Path, start: Path) -> int:
    """Compare every number of every recorded batch; how many completions have tokens of several policy versions."""
    weights = load_file(start / "model.safetensors")
    several = 0
    seen: set[str] = set()
    batches = recorded_batches(run_dir / "record")
    assert batches
    for batch in batches.values():
        assert batch["token_data/routed_experts"].dtype == np.int16
        bounds = batch["cu_seqlens"]
        for index, sample_id in enumerate(batch["sample_ids"]):
            name = str(sample_id).partition("@")[0].rpartition("/")[2]
            seen.add(name)
            own = slice(bounds[index], bounds[index + 1])
            ids, mask = batch["token_ids"][own].tolist(), batch["loss_mask"][own].tolist()
            prompt = expanded(*ROWS[name])
            assert ids[: len(prompt)] == prompt, sample_id
            assert batch["num_prompt_tokens"][index] == len(prompt)
            assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
            versions = batch["token_data/policy_version"][own].tolist()
            assert set(versions[: len(prompt)]) == {-1}
            assert versions[len(prompt) :] == sorted(versions[len(prompt) :])
            several += len(set(versions[len(prompt) :])) > 1
            for place, token in enumerate(ids):
                routes = [
                    [(token * 7 + place * 3 + layer * 5 + choice) % 11 for choice in range(2)] for layer in range(3)
                ]
                assert batch["token_data/routed_experts"][own][place].tolist() == routes, (sample_id, place)
                if versions[place] == 0:  # sampled with the weights of the start, after the token before it
                    logits = weights[TRANSITION][ids[place - 1]].astype(np.float64) + weights[UNIGRAM]
                    logprob = logits[token] - math.log(np.exp(logits).sum())
                    found = batch["token_data/generator_logprobs"][own][place]
                    assert found == pytest.approx(logprob, abs=1e-5)
    assert seen == set(ROWS), "every kind of prompt was trained on"
    return several


def begun_completions(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What the checkpoint of a step holds of completions that go on."""
    state = run_dir / "checkpoints" / f"step_{step:08d}" / "rollouts" / "state.json"
    groups = json.loads(state.read_text())["pending"] if state.exists() else []
    completions = [sample["completion"] for group in groups for sample in group["samples"] if "completion" in sample]
    return [completion for completion in completions if completion["finish_reason"] == "abort"]


def same_record(first: Path, second: Path) -> None:
    found, wanted = recorded_batches(first / "record"), recorded_batches(second / "record")
    assert found.keys() == wanted.keys()
    for name, arrays in wanted.items():
        assert found[name].keys() == arrays.keys()
        for key, values in arrays.items():
            np.testing.assert_array_equal(found[name][key], values, strict=True, err_msg=f"{name}, {key}")


@pytest.mark.slow
def test_data_of_prompts_and_completions_arrive_on_every_runtime_also_when_a_run_resumes(
    media: Any, chatlearn: Any, result_of: Any
) -> None:
    media.write()
    start, folder = media.file.parent / "bigram", media.file.parent
    whole = folder / "whole"
    finished = chatlearn("run", media.file, f"output_dir={whole}")
    assert finished.code == 0, finished.output
    assert check_record(whole, start) > 0, "completions went on over several steps"
    killed_after = next(step for step in range(1, 5) if begun_completions(whole, step))
    for runtime in ("local", "ray", "processes"):  # the last one is the probe package's own
        settings = (f"runtime.backend={runtime}", f"output_dir={folder / runtime}")
        killed = chatlearn("run", media.file, *settings, PROBE=f"saved:{killed_after}")
        assert killed.code == -signal.SIGKILL, killed.output
        for completion in begun_completions(folder / runtime, killed_after):
            assert {"token_data", "prompt_token_data"} <= completion.keys()
        resumed = chatlearn("run", media.file, *settings)
        assert resumed.code == 0, resumed.output
        assert f"resuming after step {killed_after}" in resumed.output
        check_record(folder / runtime, start)
        same_record(folder / runtime, whole)
        assert result_of(folder / runtime).model == result_of(whole).model
        assert result_of(folder / runtime).rollouts == result_of(whole).rollouts
    assert result_of(folder / "local") == result_of(whole)


def test_data_of_finished_rollouts_that_wait_in_the_buffer_are_in_checkpoints(
    media: Any, chatlearn: Any, result_of: Any
) -> None:
    media.content["algorithm"] = {
        "name": "refilled",
        "options": media.content["algorithm"]["options"] | {"num_groups": 3, "refill": 2},
    }
    media.content["rollout"] = {"max_staleness": 1}
    media.write()
    whole, parts = (media.file.parent / name for name in ("whole", "parts"))
    finished = chatlearn("run", media.file, f"output_dir={whole}")
    assert finished.code == 0, finished.output
    check_record(whole, media.file.parent / "bigram")
    made = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["samples/total"] for line in made] == [6] * 5
    assert all(line["rollout/staleness_max"] == 1 for line in made[1:]), "a step begins with what waited"
    killed = chatlearn("run", media.file, f"output_dir={parts}", PROBE="saved:2")
    assert killed.code == -signal.SIGKILL, killed.output
    state = json.loads((parts / "checkpoints" / "step_00000002" / "rollouts" / "state.json").read_text())
    assert [len(group["samples"]) for group in state["buffer"]["groups"]] == [2], "one group waits"
    resumed = chatlearn("run", media.file, f"output_dir={parts}")
    assert resumed.code == 0, resumed.output
    same_record(parts, whole)
    assert result_of(parts) == result_of(whole)
