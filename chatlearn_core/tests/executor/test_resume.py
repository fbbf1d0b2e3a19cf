"""Whether a run goes on, from where, and what may have changed in between."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.exceptions import ChatLearnError, CheckpointError, ConfigError
from chatlearn_core.executor.checkpoint import SEAL, CheckpointStore
from chatlearn_core.executor.resume import (
    MAY_CHANGE,
    ResumePoint,
    changed_settings,
    find_resume_point,
    fixed_layout,
    layout_settings,
    lock_run_directory,
)
from chatlearn_core.plugins.records import GeneratorSpec, RewardSpec, TrainerSpec

CONFIG: dict[str, Any] = {
    "seed": 0,
    "output_dir": "runs/a",
    "train": {"steps": 10, "prompts_per_step": 8},
    "roles": {"trainer": {"options": {"learning_rate": 0.1}}},
    "log": {"progress": True},
    "checkpoint": {"every": 1},
    "eval": {"every": 0},
    "rollout": {"max_retries": 1, "request_timeout_s": None},
    "runtime": {"backend": "local"},
    "weight_sync": {"backend": "auto"},
}


def changed(**paths: Any) -> dict[str, Any]:
    """CONFIG with ``section__key=value`` replaced."""
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIG.items()}
    for path, value in paths.items():
        section, _, key = path.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    return config


def make_store(tmp_path: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=10, keep_best=0)
    for step in steps:
        with store.write(step, {"config": CONFIG}):
            pass
    return store


def find(
    store: CheckpointStore, resume: Any = "auto", config: Any = CONFIG, steps: int = 10, **facts: bool
) -> ResumePoint:
    defaults = {"has_metrics": bool(store.complete()), "is_complete": False}
    return find_resume_point(store, resume, config, steps, **(defaults | facts))


def test_a_new_run_starts_at_the_beginning_without_a_word(tmp_path: Path) -> None:
    assert find(make_store(tmp_path)) == ResumePoint(None, [])


def test_auto_takes_the_newest(tmp_path: Path) -> None:
    point = find(make_store(tmp_path, 2, 4))
    assert point.checkpoint is not None
    assert point.checkpoint.step == 4
    assert point.notes == [f"resuming after step 4 from {point.checkpoint.path}"]


def test_another_length_of_the_run_is_said(tmp_path: Path) -> None:
    point = find(make_store(tmp_path, 2), steps=20)
    assert point.notes[1:] == [
        "train.steps was 10, is 20: a schedule over the run's length continues with the new length"
    ]


def test_a_damaged_one_is_passed_over_and_said_so(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, 4)
    (store.directory / "step_00000004" / SEAL).unlink()
    point = find(store)
    assert point.checkpoint is not None
    assert point.checkpoint.step == 2
    assert point.notes[0].startswith(f"skipped a checkpoint: {store.directory / 'step_00000004'}")


def test_metrics_without_a_checkpoint_mean_a_start_from_the_beginning_and_it_is_said(tmp_path: Path) -> None:
    point = find(make_store(tmp_path), has_metrics=True)
    assert point == ResumePoint(None, ["no complete checkpoint was found: the run starts from the beginning"])


@pytest.mark.parametrize(("steps", "has_metrics"), [((2,), True), ((), True), ((2,), False)])
def test_never_refuses_a_directory_that_holds_a_run(tmp_path: Path, steps: tuple[int, ...], has_metrics: bool) -> None:
    with pytest.raises(ConfigError, match="already holds a run, but --resume never starts a new one"):
        find(make_store(tmp_path, *steps), "never", has_metrics=has_metrics)


def test_never_takes_an_empty_directory(tmp_path: Path) -> None:
    assert find(make_store(tmp_path), "never") == ResumePoint(None, [])


def test_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2, 4)
    point = find(store, store.directory / "step_00000002", rewind=True)
    assert point.checkpoint is not None
    assert point.checkpoint.step == 2


def test_a_named_checkpoint_that_is_not_one_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"names .*elsewhere, and there is no such .*checkpoints/step_00000002\)"):
        find(store, tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(CheckpointError, match=r"elsewhere is not a complete checkpoint: it has no checkpoint\.json"):
        find(store, tmp_path / "elsewhere")


def test_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    config = changed(seed=1, train={"steps": 10, "prompts_per_step": 16})
    with pytest.raises(CheckpointError) as caught:
        find(make_store(tmp_path, 2), config=config)
    message = str(caught.value)
    assert "seed: was 0, is 1" in message
    assert "train.prompts_per_step: was 8, is 16" in message
    assert "start a new run with another output_dir" in message


@pytest.mark.parametrize("key", [key for key in MAY_CHANGE if "*" not in key])
def test_what_does_not_change_a_step_may_change(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    now = changed(**{f"{section}__{name}" if name else section: 12 if name else {"other": True}})
    assert now != CONFIG
    assert find(make_store(tmp_path, 2), config=now).checkpoint is not None


def test_a_timeout_may_be_raised_as_its_error_asks(tmp_path: Path) -> None:
    now = changed(roles={"trainer": {"options": {"learning_rate": 0.1}, "timeout_s": 7200.0}})
    assert find(make_store(tmp_path, 2), config=now).checkpoint is not None
    own = changed(roles={"trainer": {"options": {"learning_rate": 0.1, "timeout_s": 1.0}}})
    with pytest.raises(CheckpointError, match=r"roles\.trainer\.options\.timeout_s"):
        find(make_store(tmp_path, 2), config=own)


def test_another_number_of_ranks_and_another_device_may_go_on(tmp_path: Path) -> None:
    elsewhere = {"options": {"learning_rate": 0.1}, "timeout_s": 5.0, "ranks": 4, "replicas": 2, "device": "cpu"}
    assert find(make_store(tmp_path, 2), config=changed(roles={"trainer": elsewhere})).checkpoint is not None


def test_engine_arguments_may_change_only_where_the_plugin_calls_them_layout(tmp_path: Path) -> None:
    def with_engine(**engine: Any) -> dict[str, Any]:
        return changed(roles={"trainer": {"engine": engine}})

    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=10, keep_best=0)
    with store.write(2, {"config": with_engine()}):
        pass
    layout = ["roles.trainer.engine.gpu_memory_utilization"]

    def go_on(**engine: Any) -> Any:
        now = with_engine(**engine)
        return find_resume_point(store, "auto", now, 10, has_metrics=True, is_complete=False, may_change=layout)

    assert go_on(gpu_memory_utilization=0.5).checkpoint is not None, "an engine that ran out of memory"
    with pytest.raises(CheckpointError, match=r"roles\.trainer\.engine\.moe_router_topk: was not set, is 1"):
        go_on(moe_router_topk=1, gpu_memory_utilization=0.5)


def test_options_that_the_trainers_plugin_calls_layout_may_change(tmp_path: Path) -> None:
    options = {"learning_rate": 0.1, "dp_replicate": 2}
    now = changed(roles={"trainer": {"options": options}})
    store = make_store(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"roles\.trainer\.options\.dp_replicate: was not set, is 2"):
        find(store, config=now)
    layout = ["roles.trainer.options.dp_replicate"]
    point = find_resume_point(store, "auto", now, 10, has_metrics=True, is_complete=False, may_change=layout)
    assert point.checkpoint is not None
    options["learning_rate"] = 0.2
    with pytest.raises(CheckpointError, match=r"learning_rate: was 0\.1, is 0\.2"):
        find_resume_point(store, "auto", now, 10, has_metrics=True, is_complete=False, may_change=layout)


def test_layout_is_asked_of_trainers_among_roles_of_several_backends() -> None:
    trainer = TrainerSpec(name="t", factory="a:b", options="a:c", layout_options=("dp_shard", "offload"))
    reward = RewardSpec(name="r", factory="a:b", options="a:c")
    generator = GeneratorSpec(name="g", factory="a:b", options="a:c", layout_arguments=("max_num_seqs",))
    roles = {"trainer": [trainer], "sampler": [generator], "reward": [reward, reward]}
    plan: Any = SimpleNamespace(
        roles={
            name: SimpleNamespace(name=name, backends=[SimpleNamespace(record=record) for record in records])
            for name, records in roles.items()
        }
    )
    assert layout_settings(plan) == [
        "roles.trainer.options.dp_shard",
        "roles.trainer.options.offload",
        "roles.sampler.engine.max_num_seqs",
    ]


def test_another_layout_is_refused_where_checkpoints_are_bound_to_it(tmp_path: Path) -> None:
    """``ranks`` may change by itself, ``tp`` because it is a layout option; a trainer that cannot reshard forbids both,
    of roles that are in the checkpoint. One that can forbids nothing."""
    bound = TrainerSpec(
        name="rigid", factory="a:b", options="a:c", layout_options=("tp",), parallel={"tp": "tp"}, reshards=False
    )
    supple = replace(bound, name="supple", reshards=True)
    plan: Any = SimpleNamespace(
        roles={
            name: SimpleNamespace(name=name, trainable=learns, refresh=None, backends=[SimpleNamespace(record=record)])
            for name, learns, record in (("policy", True, bound), ("reference", False, bound), ("critic", True, supple))
        }
    )
    assert set(fixed_layout(plan)) == {"roles.policy.ranks", "roles.policy.options.tp"}
    store = make_store(tmp_path)
    then = changed(roles={"policy": {"ranks": 2, "options": {"tp": 1}}, "critic": {"ranks": 2, "options": {"tp": 1}}})
    with store.write(2, {"config": then}):
        pass

    def resume(policy: dict[str, Any], critic: dict[str, Any]) -> Any:
        now = changed(roles={"policy": policy, "critic": critic})
        allowed = layout_settings(plan)
        arguments = {"has_metrics": True, "is_complete": False, "may_change": allowed, "fixed": fixed_layout(plan)}
        return find_resume_point(store, "auto", now, 10, **arguments)

    same = {"ranks": 2, "options": {"tp": 1}}
    assert resume(same, {"ranks": 4, "options": {"tp": 2}}).checkpoint is not None
    with pytest.raises(CheckpointError) as caught:
        resume({"ranks": 4, "options": {"tp": 2}}, same)
    why = "the trainer 'rigid' does not load a checkpoint under another layout"
    assert f"roles.policy.ranks: was 2, is 4; {why}" in str(caught.value)
    assert f"roles.policy.options.tp: was 1, is 2; {why}" in str(caught.value)


def test_a_key_that_only_begins_like_one_that_may_change_may_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train\.steps_more"):
        find(make_store(tmp_path, 2), config=changed(train__steps_more=1))
    with pytest.raises(CheckpointError, match="evaluation"):
        find(make_store(tmp_path, 2), config=changed(evaluation=1))


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is complete: it made 10 of 10 steps\. Raise train\.steps to continue"):
        find(make_store(tmp_path, 10), is_complete=True)


def test_a_run_that_was_killed_before_its_model_was_exported_goes_on(tmp_path: Path) -> None:
    point = find(make_store(tmp_path, 10), is_complete=False)
    assert point.checkpoint is not None
    assert point.checkpoint.step == 10


def test_a_finished_run_goes_on_when_steps_are_raised(tmp_path: Path) -> None:
    assert find(make_store(tmp_path, 10), steps=12, is_complete=False).checkpoint is not None


def test_a_run_does_not_go_backwards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it made 10 of 5 steps"):
        find(make_store(tmp_path, 10), steps=5, is_complete=False)


def test_differences_are_named_by_their_whole_key() -> None:
    then = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    now = {"a": {"b": 2, "c": [1, 3]}, "e": 1}
    assert changed_settings(then, now) == ["a.b: was 1, is 2", "a.c.1: was 2, is 3", "e: was not set, is 1"]
    only_now = changed_settings({"roles": {}}, {"roles": {"reference": {"kind": "trainer"}}})
    assert only_now == ["roles.reference: was not set, is set"], "not all that is in it"


def _try_to_lock(path: str, outcome: Any) -> None:
    try:
        with lock_run_directory(Path(path)):
            outcome.put("locked")
    except ConfigError as error:
        outcome.put(str(error))


def test_a_lock_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ChatLearnError, match=r"cannot lock .*\.lock: .* choose another output_dir"):
            lock_run_directory(path)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ChatLearnError, match=r"cannot lock .*\.lock: No locks available\."):
        lock_run_directory(tmp_path)


def test_going_back_and_never_contradict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Omit one of them"):
        find_resume_point(make_store(tmp_path), "never", CONFIG, 10, has_metrics=False, is_complete=False, rewind=True)


def test_two_processes_cannot_run_in_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    outcome = context.Queue()
    with lock_run_directory(tmp_path):
        process = context.Process(target=_try_to_lock, args=(str(tmp_path), outcome))
        process.start()
        assert "another process is running in" in outcome.get(timeout=60)
        process.join()
    process = context.Process(target=_try_to_lock, args=(str(tmp_path), outcome))
    process.start()
    assert outcome.get(timeout=60) == "locked", "it was released"
    process.join()
