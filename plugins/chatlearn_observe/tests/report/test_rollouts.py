"""Which rollouts a report holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatlearn_observe.report import rollouts
from chatlearn_observe.report.rollouts import choose_files, collect_rollouts, shared_out
from chatlearn_observe.report.run_files import RolloutFile, read_run


def files_of(count: int) -> list[RolloutFile]:
    return [RolloutFile(Path(f"step_{step}.jsonl"), "step", step) for step in range(1, count + 1)]


def test_all_of_a_small_run(run_dir: Path) -> None:
    data = collect_rollouts(read_run(run_dir).rollout_files, 1000, None, [])
    assert len(data.samples) == 6 * 12 + 2 * 3
    assert len(data.groups) == 6 * 3 + 2 * 3
    assert data.left_out == ""
    assert data.pieces is None
    lines = [json.loads(line) for line in (run_dir / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    shown = [s for s in data.samples if data.groups[s["group"]]["step"] == 3]
    assert [s["tokens"] for s in shown] == [line["token_ids"] for line in lines]
    assert [s["text"] for s in shown] == [line["completion"] for line in lines]
    assert [s["advantages"] for s in shown] == [line["advantages"][0] for line in lines]  # equal within a sample
    assert shown[0]["generator_logprobs"] == pytest.approx(lines[0]["generator_logprobs"], abs=1e-4)


def test_a_cap_keeps_whole_groups_spread_over_steps(run_dir: Path) -> None:
    data = collect_rollouts(read_run(run_dir).rollout_files, 40, None, [])
    assert len(data.samples) <= 40
    training = [group for group in data.groups if group["kind"] == "step"]
    for index, group in enumerate(data.groups):
        members = [s for s in data.samples if s["group"] == index]
        assert len(members) == (4 if group["kind"] == "step" else 1)
    assert len({group["step"] for group in training}) >= 3
    assert data.left_out.startswith(f"{len(data.samples)} of 78 recorded samples")


def test_long_completions_lower_the_number(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "MAX_TOKENS", 600)
    data = collect_rollouts(read_run(run_dir).rollout_files, 1000, None, [])
    num_tokens = sum(len(sample["tokens"]) for sample in data.samples)
    assert 300 < num_tokens <= 600
    assert len({group["step"] for group in data.groups}) > 3
    assert data.left_out


def test_none_are_wanted(run_dir: Path) -> None:
    data = collect_rollouts(read_run(run_dir).rollout_files, 0, None, [])
    assert data.samples == []


def test_files_are_spaced_evenly_with_both_ends() -> None:
    assert [f.step for f in choose_files(files_of(1000), [64] * 1000, 80)] == [1, 251, 501, 750, 1000]
    assert [f.step for f in choose_files(files_of(3), [64] * 3, 1000)] == [1, 2, 3]
    assert [f.step for f in choose_files(files_of(3), [64] * 3, 5)] == [3]
    assert choose_files(files_of(3), [64] * 3, 0) == []


def test_unused_shares_of_small_files_go_to_the_others() -> None:
    assert shared_out([100, 2, 100], 30) == [14, 2, 14]
    assert shared_out([5, 5], 100) == [5, 5]
    assert shared_out([], 10) == []


def test_a_half_written_rollout_file_gives_its_whole_lines(run_dir: Path) -> None:
    file = run_dir / "rollouts" / "step_000006.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    notes: list[str] = []
    data = collect_rollouts(read_run(run_dir).rollout_files, 1000, None, notes)
    assert len([s for s in data.samples if data.groups[s["group"]]["step"] == 6]) == 11 + 3
    assert notes == ["step_000006.jsonl, line 12 is incomplete and is left out"]
