"""The files of a run: whole lines, rewinding, numbers that JSON does not have, disks that refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, ChatLearnError
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    sample_from_completion,
)


def _sample() -> Sample:
    prompt = Prompt("p", np.array([1, 2]), "question", "gsm8k", ground_truth={1, 2})
    completion = Completion(
        "r",
        np.array([7, 8, 9]),
        np.array([-0.5, -0.25, -1.0], np.float32),
        RAW_BASIS,
        "stop",
        SamplingParams(4),
        (),
        text="abc",
    )
    sample = sample_from_completion("p@1#0", "p@1", prompt, completion)
    sample.reward = RewardResult(0.5, {"accuracy": 1.0})
    sample.token_data["advantages"] = np.array([0, 0, 1, 1, 1], np.float32)
    return sample


def trace_of_one_span() -> Timers:
    timers = Timers()
    with timers.measure("save", role="trainer"):
        pass
    return timers


def test_metrics_come_back_as_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.append_metrics(1, {"reward": 0.5})
    directory.append_metrics(2, {"reward": float("nan"), "kl": float("inf")})
    assert directory.read_metrics() == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": "nan", "kl": "inf"}]


def test_rewind_forgets_later_steps_and_a_line_cut_short(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        directory.append_metrics(step, {"reward": float(step)})
        directory.write_rollouts(step, [])
        directory.append_trace(step, trace_of_one_span(), during="checkpoint")
    directory.write_rollouts(3, [], kind="eval")
    with directory.metrics_file.open("a") as stream:
        stream.write('{"step": 4, "rew')
    assert [line["step"] for line in directory.read_metrics()] == [1, 2, 3]
    directory.rewind(2)
    assert [json.loads(line)["step"] for line in directory.metrics_file.read_text().splitlines()] == [1, 2]
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    trace = [json.loads(line) for line in directory.trace_file.read_text().splitlines()]
    assert [(entry["step"], entry["role"], entry["during"]) for entry in trace] == [
        (1, "trainer", "checkpoint"),
        (2, "trainer", "checkpoint"),
    ]


def test_a_rollout_holds_the_completion_and_its_numbers(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_rollouts(1, [_sample()])
    [record] = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert record["prompt"] == "question"
    assert record["completion"] == "abc"
    assert record["token_ids"] == [7, 8, 9]
    assert record["generator_logprobs"] == [-0.5, -0.25, -1.0]
    assert record["advantages"] == [1.0, 1.0, 1.0]
    assert record["reward"] == 0.5
    assert record["ground_truth"] == "{1, 2}", "what JSON cannot hold is shown as text"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ChatLearnError, match=rf"cannot write {blocked}.*output_dir"):
        RunDirectory(blocked)


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ChatLearnError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        directory.append_metrics(1, {})


def test_a_model_is_replaced_as_a_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.replacing_model() as aside:
        aside.mkdir()
        (aside / "old.json").write_text("1")
    with directory.replacing_model() as aside:
        aside.mkdir()
        (aside / "new.json").write_text("2")
        assert [file.name for file in directory.model.iterdir()] == ["old.json"]
    assert [file.name for file in directory.model.iterdir()] == ["new.json"]


def test_a_model_that_the_disk_does_not_take_leaves_the_earlier_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.model.mkdir()

    def fail() -> None:
        with directory.replacing_model() as aside:
            aside.mkdir()
            raise BackendError("role 'trainer': export_model failed: No space left on device")

    with pytest.raises(ChatLearnError, match=r"cannot write .*model: .*No space left on device.*output_dir"):
        fail()
    assert directory.model.is_dir()
    assert not (tmp_path / ".writing_model").exists()
