"""The files of a run: whole lines, rewinding, numbers that JSON does not have, disks that refuse."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, ChatLearnError
from chatlearn_core.metrics import RunDirectory, Timers
from chatlearn_core.metrics.durable_files import read_lines
from chatlearn_core.metrics.run_directory import recorded_fields
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
    sample = _sample()
    sample.token_data["reference_topk_logprobs"] = np.zeros((len(sample.token_ids), 4), np.float32)
    directory.write_rollouts(1, [sample])
    [record] = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert record["prompt"] == "question"
    assert "reference_topk_logprobs" not in record, "four numbers a token"
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


def limit_file_size(num_bytes: int) -> None:
    """Every file of this process ends there, as on a disk that fills up in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], None]]:
    yield limit_file_size
    limit_file_size(resource.RLIM_INFINITY)


def test_a_short_write_leaves_no_part_of_a_line(tmp_path: Path, small_disk: Callable[[int], None]) -> None:
    directory = RunDirectory(tmp_path)
    directory.append_metrics(1, {"reward": 0.5})
    whole = directory.metrics_file.read_bytes()
    small_disk(len(whole) + 5)
    with pytest.raises(ChatLearnError, match=r"cannot write .*metrics\.jsonl: File too large"):
        directory.append_metrics(2, {"reward": 0.5})
    with pytest.raises(ChatLearnError, match=r"cannot write .*summary\.json: File too large"):
        directory.write_json("summary.json", {"text": "x" * 100})
    assert directory.metrics_file.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl", "rollouts"]


@pytest.mark.parametrize(
    "broken", [b'{"step": 2, "rew', b"\xff\xfe", b"[1]", b'{"name": 1}', b"[" * 100_000, b'{"step":"2"}']
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.jsonl"])
def test_broken_lines_are_left_out_removed_and_told(tmp_path: Path, name: str, broken: bytes) -> None:
    directory = RunDirectory(tmp_path)
    first, last = b'{"step": 1, "a": "\xe2\x80\xa8"}\n', b'{"step": 3}\n'
    (tmp_path / name).write_bytes(first + broken + b"\n" + last + broken)
    if name == "metrics.jsonl":
        assert [line["step"] for line in directory.read_metrics()] == [1, 3]
    [sentence] = directory.rewind(3)
    assert f"{tmp_path / name} had broken lines, which were removed: 2, 4." in sentence
    assert (tmp_path / name).read_bytes() == first + last
    assert directory.rewind(3) == []


def test_a_line_after_one_that_a_kill_cut_short_is_its_own(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.append_event("start")
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"time": "2')
    directory.append_event("resume")
    lines, broken = read_lines(tmp_path / "events.jsonl")
    assert [line.record["event"] for line in lines] == ["start", "resume"]
    assert broken == [2]


@pytest.mark.parametrize("content", [b"", b'{"status": "comp', b"[]", b"\xff"])
def test_a_damaged_summary_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    assert RunDirectory(tmp_path).read_summary() == {}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_rollouts(1, [])
    (tmp_path / ".failure.md.tmp").write_text("")
    (tmp_path / "rollouts" / ".step_000002.jsonl.tmp").write_text("")
    for name in (".writing_model", ".replaced_model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    directory.remove_unfinished()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "checkpoints", "config.json", "model", "rollouts", "step_000001.jsonl"
    ]  # fmt: skip
    assert (directory.model / "config.json").read_text() == ".replaced_model", "the export had put it aside"


def test_text_of_others_can_be_written_and_comes_back(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    hostile = "half \ud800 of a pair, \x1b[31m, \x9b2J, \u2028, 你好"
    directory.append_event("error", text=hostile, facts={"of": object})
    directory.write_text("failure.md", hostile)
    directory.write_json("summary.json", {"error": hostile})
    sample = _sample()
    sample.exclusion = hostile
    directory.write_rollouts(1, [sample])
    for file in ("events.jsonl", "rollouts/step_000001.jsonl"):
        content = (tmp_path / file).read_bytes()
        assert content.count(b"\n") == 1
        assert not {"\x1b", "\x9b", "\u2028"} & set(content.decode())
        assert hostile in json.loads(content).values()
    assert directory.read_summary() == {"error": hostile}
    assert "half \\ud800 of" in (tmp_path / "failure.md").read_text()


def test_rollouts_hold_numbers_of_tokens_and_not_k_of_each(tmp_path: Path) -> None:
    sample = _sample()
    sample.token_data["teacher_topk_logprobs"] = np.zeros((len(sample.token_ids), 4), np.float32)
    assert "teacher_topk_logprobs" not in recorded_fields([sample])
    directory = RunDirectory(tmp_path)
    directory.write_rollouts(1, [sample])
    [record] = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert "teacher_topk_logprobs" not in record
    assert "generator_logprobs" in record
