"""Rollouts that are written without training, and trained on without sampling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chatlearn_async.recorded import steps_in
from chatlearn_async.recorder import RolloutRecorder
from chatlearn_cli import run as command
from chatlearn_core.exceptions import CheckpointError, ConfigError, Interrupted
from chatlearn_core.executor.progress import RunListener
from chatlearn_core.plugins.observers import Observer, Observers
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.generator import FakeGenerator
from chatlearn_testing.fakes.reward import FakeReward

ORIGIN = ("training/epoch", "sync/")
"""Metrics of drawing and of weight syncs, which a run on recorded rollouts does not do."""


class StopAfter(RunListener):
    """Cancels the current task after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()


async def recorded(runs: Any, name: str, *overrides: str, listener: RunListener | None = None) -> Path:
    folder: Path = await RolloutRecorder(runs.assemble(name, {}, *overrides), listener).record()
    return folder


def reading(folder: Path) -> dict[str, Any]:
    return {"mode": "recorded", "options": {"directory": str(folder)}}


def without(result: Mapping[str, Any], *names: str) -> dict[str, Any]:
    lines = [{k: v for k, v in line.items() if not k.startswith(names)} for line in result["metrics"]]
    return {**result, "metrics": lines}


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
async def test_one_step_trains_on_what_sync_samples_and_has_its_result(
    algorithm: str, runs: Any, completed: Any
) -> None:
    runs.content["algorithm"]["name"] = algorithm
    sync = await completed("sync", {}, "train.steps=1", "sampling.max_tokens=3")
    folder = await recorded(runs, "rollouts", "train.steps=1", "sampling.max_tokens=3")
    found = await completed("found", reading(folder), "train.steps=1", "sampling.max_tokens=3")
    assert without(found, *ORIGIN) == without(sync, *ORIGIN)
    assert sync["metrics"][0]["policy/grad_norm"] > 0, "something is learned"
    assert not (folder / "model").exists(), "a recording trains nothing"
    if algorithm == "dapo":
        assert sync["metrics"][0]["rollout/refills"] > 0, "groups of equal rewards are replaced"


async def test_each_step_trains_on_the_next_groups_and_a_stopped_run_goes_on_with_them(
    runs: Any, completed: Any
) -> None:
    folder = await recorded(runs, "rollouts")
    expected = await completed("expected", reading(folder))
    steps = runs.trained("expected")
    assert [len(step) for step in steps] == [6] * 6
    await completed("sync", {})
    assert steps == runs.trained("sync"), "the sampler draws them in the same order"
    assert [line["rollout/staleness_max"] for line in expected["metrics"]] == [0, 1, 2, 3, 4, 5]
    run = runs.make("stopped", reading(folder))
    calls: list[int] = []

    def interrupt() -> None:
        calls.append(len(calls))
        if len(calls) == 4:
            running.cancel()

    run.observers = Observers([Observer("chatlearn_rollout_end", "test 1", interrupt, ())])
    running = asyncio.ensure_future(run.train())
    with pytest.raises(Interrupted):
        await running
    assert await completed("stopped", reading(folder)) == expected


async def test_generators_and_rewards_start_only_for_evaluations(
    runs: Any, completed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await recorded(runs, "rollouts", "train.steps=2")
    started: list[str] = []
    for kind in (FakeGenerator, FakeReward):

        def setup(self: Any, original: Any = kind.setup) -> None:
            started.append(type(self).__name__)
            original(self)

        monkeypatch.setattr(kind, "setup", setup)
    alone = await completed("alone", reading(folder), "train.steps=2")
    assert started == []
    assert not any(name.startswith("sync/") for line in alone["metrics"] for name in line)
    assert not (runs.folder / "alone" / "events.jsonl").exists(), "no weight sync is announced"
    runs.content["data"]["eval"] = [{**runs.content["data"]["train"][0], "limit": 2}]
    evaluated = await completed("evaluated", reading(folder), "train.steps=2")
    assert set(started) == {"FakeGenerator", "FakeReward"}
    assert "eval/reward" in evaluated["metrics"][-1]
    assert evaluated["model"] == alone["model"]


async def test_another_number_of_prompts_per_step_trains_on_the_same_groups(runs: Any, completed: Any) -> None:
    folder = await recorded(runs, "rollouts", "train.steps=2")
    await completed("found", reading(folder), "train.prompts_per_step=2", "train.steps=3")
    await completed("sync", {}, "train.steps=2")
    found, sync = ([name for step in runs.trained(run) for name in step] for run in ("found", "sync"))
    assert found == sync


async def test_a_stopped_recording_goes_on_after_its_last_step(runs: Any) -> None:
    whole = await recorded(runs, "whole", "train.steps=3")
    with pytest.raises(Interrupted, match="stopped after the rollouts of 2 steps"):
        await recorded(runs, "stopped", "train.steps=3", listener=StopAfter(2))
    stopped = runs.folder / "stopped"
    assert len(steps_in(str(stopped), "")) == 2
    assert await recorded(runs, "stopped", "train.steps=3") == stopped
    for one in ("step_00000001", "step_00000002", "step_00000003"):
        files = [folder / "recorded" / one / "rollouts" / "state.json" for folder in (whole, stopped)]
        assert files[0].read_text() == files[1].read_text()
        assert files[0].with_suffix(".npz").stat().st_size == files[1].with_suffix(".npz").stat().st_size
    with pytest.raises(ConfigError, match=r"other settings:\n  seed: was 0, is 5\n  Restore them, delete that dir"):
        await recorded(runs, "stopped", "train.steps=4", "seed=5")


async def test_a_directory_that_does_not_fit_is_refused_by_key_value_and_remedy(runs: Any, tmp_path: Path) -> None:
    folder = await recorded(runs, "rollouts", "train.steps=2")

    async def refused(match: str, *overrides: str, directory: Path = folder) -> None:
        with pytest.raises(ConfigError, match=match):
            await runs.make("refused", reading(directory), *overrides).train()

    await refused(
        r"rollout.options.directory is .*nowhere, which does not exist .* Name the output_dir",
        directory=tmp_path / "nowhere",
    )
    await refused(
        r"directory is .*, which has no recorded rollouts \(directories recorded/step_\*\)", directory=tmp_path
    )
    await refused(
        r"which has 6 groups in 2 steps, but train.steps 3 x train.prompts_per_step 3 need 9. Lower train.steps to 2",
        "train.steps=3",
    )
    await refused(
        r"recorded in groups of 2 \(algorithm.options.group_size is 4 here",
        "train.steps=2",
        "algorithm.options.group_size=4",
    )
    other = build_bigram_model(tmp_path / "other", seed=7)
    await refused(
        r"recorded by another model, .* \(model.path is '.*other' here", "train.steps=2", f"model.path={other}"
    )
    data = runs.folder / "few.jsonl"
    data.write_text(json.dumps({"prompt": "abc", "answer": "a"}) + "\n")
    await refused(
        r"rollouts of \d prompts that data.train does not have, such as", "train.steps=2", f"data.train.0.path={data}"
    )
    seal = folder / "recorded" / "step_00000001" / "checkpoint.json"
    seal.write_text("{")
    await refused(r"rollout.options.directory is .* is not a complete checkpoint: checkpoint.json", "train.steps=2")


async def test_a_damaged_file_is_named(runs: Any) -> None:
    folder = await recorded(runs, "rollouts", "train.steps=1")
    arrays = folder / "recorded" / "step_00000001" / "rollouts" / "state.npz"
    content = bytearray(arrays.read_bytes())
    content[-40] ^= 1
    arrays.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"step_00000001 is damaged: the contents of rollouts/state.npz changed"):
        await runs.make("found", reading(folder), "train.steps=1").train()


async def test_what_makes_no_rollouts_is_refused(runs: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout.partial is 'resume', but --rollouts-only has no weight syncs"):
        RolloutRecorder(runs.assemble("partial", {"partial": "resume", "round_tokens": 4}))


def test_the_command_writes_rollouts_and_trains_on_them(
    runs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "discover", lambda strict: runs.registry)
    file = runs.folder / "run.yaml"
    file.write_text(json.dumps({**runs.content, "output_dir": str(runs.folder / "rollouts")}))
    command.run(file, ["train.steps=1"], rollouts_only=True)
    assert f"--from-rollouts {runs.folder / 'rollouts'}" in capsys.readouterr().err
    command.run(
        file, ["train.steps=1", f"output_dir={runs.folder / 'trained'}"], from_rollouts=runs.folder / "rollouts"
    )
    assert (runs.folder / "trained" / "model" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="Omit one of them"):
        command.run(file, [], rollouts_only=True, from_rollouts=runs.folder)
    with pytest.raises(ConfigError, match="omit --resume and --rewind"):
        command.run(file, [], rollouts_only=True, resume="never")
