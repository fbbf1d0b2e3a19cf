"""Bad input, and what comes back: one clean message that says what, where and what to do; no sample lost silently."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ROW = {"prompt": "what is 1 plus 1?", "answer": "2"}


def data_file(recipe: Any, content: bytes | str, **settings: Any) -> Path:
    """Make this the training data."""
    file: Path = recipe.file.parent / "bad.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe.content["data"]["train"] = [{"path": str(file), "format": "prompt"} | settings]
    return file


def rows(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def own_model(recipe: Any) -> Path:
    """A copy of the model, to be spoilt."""
    path: Path = recipe.file.parent / "model"
    shutil.copytree(recipe.content["model"]["path"], path)
    recipe.content["model"]["path"] = str(path)
    return path


def missing_file(recipe: Any) -> list[str]:
    recipe.content["data"]["train"] = [{"path": "nowhere/sums.jsonl", "format": "prompt"}]
    return ["nowhere/sums.jsonl", "does not exist"]


def empty_file(recipe: Any) -> list[str]:
    return [str(data_file(recipe, ""))]


def malformed_row(recipe: Any) -> list[str]:
    file = data_file(recipe, rows(ROW, ROW, '{"prompt": "what is'))
    return [f"{file} line 3", "JSON"]


def row_without_answer(recipe: Any) -> list[str]:
    file = data_file(recipe, rows({"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?"}), format="gsm8k")
    return [f"{file} line 2", "answer"]


def empty_prompt(recipe: Any) -> list[str]:
    file = data_file(recipe, rows(ROW, {"prompt": "", "answer": "2"}))
    return [f"{file} line 2", "empty"]


def prompts_longer_than_the_model(recipe: Any) -> list[str]:
    data_file(recipe, rows({"prompt": "1 plus " * 900, "answer": "2"}))
    return ["bad.jsonl", "max_prompt_tokens"]


def not_utf8(recipe: Any) -> list[str]:
    file = data_file(recipe, rows(ROW).encode() + b'{"prompt": "caf\xe9", "answer": "2"}\n')
    return [f"{file} line 2", "UTF-8"]


def duplicate_ids(recipe: Any) -> list[str]:
    file = data_file(recipe, rows(ROW | {"id": "a"}, ROW | {"id": "b"}, ROW | {"id": "a"}))
    return [f"{file} line 3", "'a'", "1"]


def no_model(recipe: Any) -> list[str]:
    recipe.content["model"]["path"] = "nowhere/model"
    return ["run.yaml, model.path: 'nowhere/model' is neither"]


def no_tokenizer(recipe: Any) -> list[str]:
    path = own_model(recipe)
    for file in path.glob("tokenizer*"):
        file.unlink()
    return [f"run.yaml, model.path: {path} has no tokenizer", "in model.tokenizer"]


def model_without_weights(recipe: Any) -> list[str]:
    path = own_model(recipe)
    (path / "model.safetensors").unlink()
    return [str(path), "safetensors"]


def weights_cut_short(recipe: Any) -> list[str]:
    file = own_model(recipe) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    return [str(file.parent)]


def foreign_tokenizer(recipe: Any) -> list[str]:
    from chatlearn_hf.tiny import build_tiny_tokenizer

    path = own_model(recipe)
    build_tiny_tokenizer(512, extra_tokens=[f"<extra {i}>" for i in range(200)]).save_pretrained(path)
    return [str(path), "tokenizer"]


def unknown_key(recipe: Any) -> list[str]:
    recipe.content["train"]["step"] = 3
    return ["run.yaml", "train.step: unknown key (got 3)", "did you mean 'steps'?"]


def several_mistakes_at_once(recipe: Any) -> list[str]:
    recipe.content["train"]["mini_batches"] = 0
    recipe.content["roles"]["generator"]["backend"] = "transfomers"
    recipe.content["sampling"]["temperature"] = "hot"
    return ["train.mini_batches", "'transfomers'", "transformers", "sampling.temperature", "hot"]


def completions_longer_than_the_model(recipe: Any) -> list[str]:
    recipe.content["sampling"]["max_tokens"] = 512
    return ["sampling.max_tokens", "512"]


def group_of_one(recipe: Any) -> list[str]:
    recipe.content["algorithm"]["options"]["group_size"] = 1
    return ["algorithm.options.group_size: must be greater than or equal to 2 (got 1)"]


def critic_that_nothing_calls(recipe: Any) -> list[str]:
    recipe.content["roles"]["critic"] = {"kind": "trainer", "backend": "fsdp", "head": "value"}
    return ["roles.critic is defined, but the flow of algorithm 'grpo' never calls it. Remove the role"]


def raw_logprobs_in_a_ratio(recipe: Any) -> list[str]:
    recipe.content["roles"]["generator"]["backend"] = "raw"
    recipe.content["sampling"]["temperature"] = 0.7
    recipe.content["algorithm"]["options"]["importance_correction"] = "truncate"
    return ["algorithm.options.importance_correction=truncate compares", "generator_logprobs of raw (role generator)"]


def truncated_logprobs_without_a_bound_on_the_ids(recipe: Any) -> list[str]:
    recipe.content["sampling"]["top_p"] = 0.9
    recipe.content["algorithm"]["options"]["truncated_logprobs"] = True
    return ["truncated_logprobs", "sampling.top_k is 0", "Set sampling.top_k above 0"]


def truncated_logprobs_of_a_generator_that_returns_no_ids(recipe: Any) -> list[str]:
    recipe.content["roles"]["generator"]["backend"] = "raw"
    recipe.content["sampling"]["top_k"] = 5
    recipe.content["algorithm"]["options"]["truncated_logprobs"] = True
    return ["generator 'raw' (roles.generator) with these options does not return them", "Choose transformers"]


def logprobs_of_another_basis_than_declared(recipe: Any) -> list[str]:
    recipe.content["roles"]["generator"]["backend"] = "untrue"
    recipe.content["sampling"]["temperature"] = 0.7
    return ["generator 'untrue' (role 'generator') returned logprobs of basis raw", "temperature=0.7", "bases"]


def trainer_over_ranks(recipe: Any, backend: str, ranks: int, **role: Any) -> None:
    recipe.content["roles"]["trainer"] = {"kind": "trainer", "backend": backend, "ranks": ranks} | role
    recipe.content["runtime"] = {"backend": "ray"}


def layout_that_does_not_divide_the_model(recipe: Any) -> list[str]:
    trainer_over_ranks(recipe, "megatron", 4, options={"tensor_parallel": 4})
    return [
        "run.yaml, roles.trainer.options: trainer 'megatron' cannot train this qwen3 model over ranks: 4 as they say:",
        "tensor_parallel 4 does not divide the model's 2 key-value heads; it may be 1, 2",
        "nearest layouts of 4 ranks that fit: {tensor_parallel: 2}; ",
    ]


def adapters_of_modules_that_the_model_lacks(recipe: Any) -> list[str]:
    trainer_over_ranks(recipe, "megatron", 1, options={"lora": {"target_modules": ["q_proj", "c_attn"]}})
    return [
        "run.yaml, roles.trainer.options: trainer 'megatron' cannot train this qwen3 model over ranks: 1 as they say:",
        "lora.target_modules 'c_attn' names no linear layer that can have an adapter; it may be q_proj, k_proj, ",
    ]


def ulysses_groups_that_do_not_divide_the_heads(recipe: Any) -> list[str]:
    trainer_over_ranks(recipe, "deepspeed", 6, options={"ulysses": 3})
    return ["ulysses 3 does not divide the model's 4 query heads; of 6 ranks it may be 1, 2"]


def tensor_parallel_ranks_that_do_not_divide_the_heads(recipe: Any) -> list[str]:
    trainer_over_ranks(recipe, "fsdp", 4, options={"tensor_parallel": 4})
    return [
        "trainer 'fsdp' cannot train this qwen3 model over ranks: 4 as they say:",
        "tensor_parallel 4 does not divide the model's 2 key-value heads; of 4 ranks it may be 1, 2",
    ]


def native_setting_of_an_option(recipe: Any) -> list[str]:
    trainer_over_ranks(recipe, "deepspeed", 2, engine={"zero_optimization": {"stage": 1}})
    return ["roles.trainer.engine.zero_optimization.stage: ", "set options.zero_stage (got 1)"]


BAD_INPUT = [
    missing_file,
    empty_file,
    malformed_row,
    row_without_answer,
    empty_prompt,
    prompts_longer_than_the_model,
    not_utf8,
    duplicate_ids,
    no_model,
    no_tokenizer,
    model_without_weights,
    weights_cut_short,
    foreign_tokenizer,
    unknown_key,
    several_mistakes_at_once,
    completions_longer_than_the_model,
    group_of_one,
    critic_that_nothing_calls,
    raw_logprobs_in_a_ratio,
    truncated_logprobs_without_a_bound_on_the_ids,
    truncated_logprobs_of_a_generator_that_returns_no_ids,
    logprobs_of_another_basis_than_declared,
    layout_that_does_not_divide_the_model,
    adapters_of_modules_that_the_model_lacks,
    ulysses_groups_that_do_not_divide_the_heads,
    tensor_parallel_ranks_that_do_not_divide_the_heads,
    native_setting_of_an_option,
]


@pytest.mark.parametrize("spoil", BAD_INPUT, ids=lambda spoil: spoil.__name__)
def test_bad_input_is_named_and_nothing_else_happens(
    spoil: Callable[[Any], list[str]], recipe: Any, chatlearn: Any, tmp_path: Path
) -> None:
    expected = spoil(recipe)
    recipe.write()
    before = {path.name for path in tmp_path.iterdir()}
    finished = chatlearn("run", recipe.file)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    assert finished.output.count("error:") == 1, finished.output
    for text in expected:
        assert text in finished.output
    assert {path.name for path in tmp_path.iterdir()} - before <= {"run"}, (
        "nothing is written outside the run directory"
    )
    assert not (recipe.run_dir / "model").exists()


def reward_role(recipe: Any, backend: str, **role: Any) -> None:
    recipe.content["roles"]["reward"] = {"kind": "reward", "backend": backend} | role
    recipe.write()


def test_raw_logprobs_that_nothing_compares_are_told_of_and_harmless(recipe: Any, chatlearn: Any) -> None:
    recipe.content["roles"]["generator"]["backend"] = "raw"
    recipe.content["sampling"]["temperature"] = 0.7
    recipe.content["train"]["steps"] = 1
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    assert "warning: " in finished.output
    assert "roles.generator: raw returns logprobs of the raw distribution" in finished.output
    [line] = [json.loads(text) for text in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "policy/pg_loss" in line
    assert not [name for name in line if name.startswith("mismatch/")]


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("raising", "KeyError: 'answer'"),
        ("hanging", "no answer within 2 s (roles.reward.timeout_s)"),
        ("nan", "the reward is nan, not a finite number"),
        ("miscounting", "results for"),
    ],
)
def test_a_reward_that_always_fails_stops_the_run_with_its_reason(
    backend: str, problem: str, recipe: Any, chatlearn: Any
) -> None:
    reward_role(recipe, backend, timeout_s=2.0)
    finished = chatlearn("run", recipe.file)
    assert finished.code == 2, finished.output
    assert "error: all 12 samples of step 1 failed; most frequent reason" in finished.output
    assert problem in finished.output
    assert "Traceback" not in finished.output
    summary = json.loads((recipe.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert problem in summary["error"]


def test_samples_whose_reward_fails_are_excluded_and_counted_and_the_run_goes_on(recipe: Any, chatlearn: Any) -> None:
    recipe.content["algorithm"]["options"]["group_size"] = 4
    recipe.content["train"]["steps"] = 2
    reward_role(recipe, "moody")  # NaN for the first of each group, an error of its own for the second
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    assert "8 of 16 samples excluded" in finished.output
    lines = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["samples/total"] == line["samples/trained"] + line["samples/excluded"] == 16
        assert line["samples/excluded/reward_failed"] == 8
    totals = json.loads((recipe.run_dir / "summary.json").read_text())["totals"]
    assert totals["samples/total"] == totals["samples/trained"] + totals["samples/excluded"] == 32
    rollouts = [
        json.loads(line) for line in (recipe.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert {record["excluded"] for record in rollouts} == {
        None,
        "reward failed: moody: the reward is nan, not a finite number",
        "reward failed: moody: no answer in it",
    }


def test_a_generator_that_dies_is_rebuilt_and_the_run_ends_as_if_it_had_not(
    recipe: Any, chatlearn: Any, result_of: Any
) -> None:
    undisturbed = recipe.file.parent / "undisturbed"
    assert chatlearn("run", recipe.file, f"output_dir={undisturbed}").code == 0
    finished = chatlearn("run", recipe.file, PROBE="engine:17", PROBE_DEATHS="1")
    assert finished.code == 0, finished.output
    there, here = result_of(undisturbed), result_of(recipe.run_dir)
    assert here.totals == there.totals, "no sample is lost"
    assert here.model == there.model


def test_a_generator_that_dies_too_often_stops_the_run_and_keeps_the_checkpoint(recipe: Any, chatlearn: Any) -> None:
    finished = chatlearn("run", recipe.file, PROBE="engine:17", PROBE_DEATHS="99")
    assert finished.code == 2, finished.output
    assert "role 'generator': replica 0 died, and 2 restart(s), the limit" in finished.output
    assert "runtime.options.max_generator_restarts" in finished.output
    assert "the engine process was killed" in finished.output
    assert "A checkpoint of step 1 is in" in finished.output
    assert "Traceback" not in finished.output
    assert json.loads((recipe.run_dir / "summary.json").read_text())["status"] == "failed"
    resumed = chatlearn("run", recipe.file)
    assert resumed.code == 0, resumed.output
    assert "resuming after step 1" in resumed.output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for a checkpoint and not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = 1400 << 10
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs; see test_a_file_that_the_disk_does_not_take")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(recipe: Any, chatlearn: Any, small_disk: Path, result_of: Any) -> None:
    undisturbed = recipe.file.parent / "undisturbed"
    assert chatlearn("run", recipe.file, f"output_dir={undisturbed}").code == 0
    run_dir = small_disk / "run"
    settings = (f"output_dir={run_dir}", "checkpoint.keep_last=5")
    finished = chatlearn("run", recipe.file, *settings)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    assert "cannot write the checkpoint of step" in finished.output
    assert "free space or permissions on that disk first" in finished.output
    kept = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert kept, "earlier checkpoints are whole"
    assert all(name.startswith("step_") for name in kept)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = chatlearn("run", recipe.file, *settings)
    assert resumed.code == 0, resumed.output
    assert f"resuming after step {int(kept[-1][5:])}" in resumed.output
    assert result_of(run_dir) == result_of(undisturbed)


def test_a_file_that_the_disk_does_not_take(recipe: Any, chatlearn: Any) -> None:
    finished = chatlearn("run", recipe.file, file_limit=64 << 10)
    assert finished.code == 2, finished.output
    assert "cannot write the checkpoint of step 1" in finished.output
    assert "Traceback" not in finished.output
    assert list((recipe.run_dir / "checkpoints").iterdir()) == []


def test_an_output_that_cannot_be_written(recipe: Any, chatlearn: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    if os.geteuid() == 0:
        blocked.write_text("a file, where root could write into any directory")
    else:
        blocked.mkdir(mode=0o500)
    finished = chatlearn("run", recipe.file, f"output_dir={blocked}/run")
    assert finished.code == 2, finished.output
    if blocked.is_dir():  # found when the run writes; a file in the way, as its settings are checked
        assert f"error: cannot write {blocked}/run: " in finished.output
    else:
        assert f"lies below {blocked}, which is not a directory" in finished.output
    assert "choose another directory" in finished.output
    assert "Traceback" not in finished.output


def test_two_runs_in_one_directory(recipe: Any, start: Any, chatlearn: Any) -> None:
    reward_role(recipe, "blocking")
    first = start("run", recipe.file)
    first.wait_for("the reward blocks")
    second = chatlearn("run", recipe.file)
    os.kill(first.pid, 9)
    first.wait()
    assert second.code == 2
    assert f"another process is running in {recipe.run_dir}" in second.output
