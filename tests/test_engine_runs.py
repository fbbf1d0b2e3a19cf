"""GRPO from end to end with a real engine as generator: it trains, and engine and trainer agree on every logprob."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from chatlearn_cli.convert import convert
from chatlearn_core.config.load import load_config
from chatlearn_core.exceptions import CheckpointError, ConfigError
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_data.arithmetic import problems, prompt_records
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_testing.listeners import listening_meanwhile, reached_from_outside
from chatlearn_testing.model_directory import read_checkpoint

STEPS = 3
MISMATCH = 1e-4
"""Largest difference of a logprob, float32 (invariant 3 of the design); both read the same weights."""


EVERY_VERSION = {"backend": "checkpoint", "export": "full_tensors", "options": {"keep_versions": STEPS + 1}}
"""A weight sync that leaves the weights of all versions on disk: transformers reads no checkpoint of these trainers."""
ON_RAY: dict[str, Any] = {"runtime": {"backend": "ray", "options": {"object_store_mb": 100}}}
SLOWER_THAN_UPDATES = {"backend": "transformers", "options": {"num_threads": 1, "max_num_sequences": 4}}
"""A generator. With completions that are ``LONG``, a weight sync interrupts some."""
LONG = {"max_tokens": 150}
OTHER_TRAINER = {"kind": "trainer", "backend": "fsdp", "device": "cpu", "options": {"num_threads": 1}}
TRUNCATED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
CHECK = """
def is_right(text, ground_truth):
    return sum(map(ord, text)) % 3 == 0  # differs within groups
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 97 / 97  # differs within every group
"""


def configuration(
    directory: Path,
    generator: dict[str, Any],
    sampling: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    roles: Mapping[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    apply_chat_template: bool = False,
    **settings: Any,
) -> str:
    model = build_tiny_model(directory / "model", hidden=128)
    rows = list(prompt_records(problems(), "train", 4 * STEPS, 7))
    data = directory / "prompts.jsonl"
    reward = directory / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    everyone = {
        "trainer": {
            "kind": "trainer",
            "backend": "fsdp",
            "device": "cpu",
            # Large steps: stale weights would show.
            "options": {"learning_rate": 1e-2, "num_threads": 1},
        }
        | (trainer or {}),
        "generator": {"kind": "generator", "device": "cpu", **generator},
        "reward": {
            "kind": "reward",
            "backend": "function",
            "options": {"path": f"{reward}:compute_score"},
        },
    } | (roles or {})
    records = [{"id": row["id"], "prompt": row["prompt"][0]["content"], "ground_truth": "7"} for row in rows]
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return yaml.safe_dump(
        {
            "output_dir": str(directory / "run"),
            "model": {"path": str(model)},
            "data": {"train": [{"path": str(data), "format": "prompt"}], "apply_chat_template": apply_chat_template},
            "algorithm": algorithm
            or {"name": "grpo", "options": {"group_size": 4, "truncated_logprobs": "top_k" in sampling}},
            "roles": {name: role for name, role in everyone.items() if role is not None},
            "sampling": {"max_tokens": 12} | sampling,
            "train": {"steps": STEPS, "prompts_per_step": 4},
            "checkpoint": {"export": False},
            "log": {"progress": False},
        }
        | settings
    )


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_vllm_while_the_trainer_updates(tmp_path: Path) -> None:
    """Asynchronous, with the engine in the process of the trainer."""
    assert_trains_asynchronously(tmp_path, vllm("process"), {"max_tokens": 48})


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_megatron_ranks_while_the_trainer_updates(tmp_path: Path) -> None:
    """Two tensor parallel ranks and the generator are workers of Ray."""
    options = OTHER_TRAINER["options"] | {"learning_rate": 1e-2, "tensor_parallel": 2, "sequence_parallel": True}
    versions = assert_trains_asynchronously(
        tmp_path,
        SLOWER_THAN_UPDATES,
        LONG,
        trainer={"backend": "megatron", "ranks": 2, "options": options},
        weight_sync=EVERY_VERSION | {"fleet_rule": "rolling"},  # completions go on until the replica loads
        **ON_RAY,
    )
    assert any(len(ends) > 1 for ends in versions.values()), "a weight sync within a completion"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks"),
    [pytest.param(1, 1, marks=pytest.mark.thorough), (3, 1), pytest.param(3, 2, marks=pytest.mark.thorough)],
)
def test_grpo_with_deepspeed_while_the_trainer_updates(stage: int, ranks: int, tmp_path: Path) -> None:
    """One rank in this process, or workers of Ray with a part of the weights each."""
    options = OTHER_TRAINER["options"] | {"learning_rate": 1e-2, "zero_stage": stage}
    versions = assert_trains_asynchronously(
        tmp_path,
        SLOWER_THAN_UPDATES,
        LONG | {"temperature": 0.8},
        trainer={"backend": "deepspeed", "ranks": ranks, "options": options},
        weight_sync=EVERY_VERSION,
        **(ON_RAY if ranks > 1 else {}),
    )
    assert any(len(ends) > 1 for ends in versions.values()), "a weight sync within a completion"


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_an_environment_and_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts, with truncated sampling, whose kept ids the engine returns: the trainer's forward over the whole
    conversation has the logprobs that the engine gave in each turn.
    """
    (tmp_path / "checks_of_attempts.py").write_text(CHECK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    options = {"check": "checks_of_attempts:is_right", "max_attempts": 2}
    roles = {"environment": "retry", "reward": None}
    steps = assert_trains(
        tmp_path,
        vllm("child"),
        TRUNCATED,
        roles={
            "reward": None,
            "retry": {
                "kind": "environment",
                "backend": "correction",
                "uses": {"policy": "generator"},
                "options": options,
            },
        },
        algorithm={"name": "grpo", "options": {"group_size": 4, "truncated_logprobs": True, "roles": roles}},
        apply_chat_template=True,
    )
    assert all(1 < step["environment/turns"] <= 2 for step in steps)


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_sglang_while_the_trainer_updates(tmp_path: Path) -> None:
    assert_trains_asynchronously(tmp_path, sglang(), {"temperature": 0.8})


@pytest.mark.engine
def test_ppo_with_megatron_and_its_critic_and_reference_on_fsdp(tmp_path: Path) -> None:
    """One process, with the embedded generator."""
    steps = assert_trains(
        tmp_path,
        {"backend": "transformers"},
        trainer={"backend": "megatron"},
        roles={"critic": OTHER_TRAINER | {"head": "value"}, "reference": OTHER_TRAINER},
        algorithm={"name": "ppo", "options": {"kl_coef": 0.1}},
    )
    assert_starts_at_the_reference(steps)
    assert steps[0]["critic/grad_norm"] > 0


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_zero_3_ranks_and_sglang(tmp_path: Path) -> None:
    """Two workers of Ray shard the model by DeepSpeed; two names differ from a run on FSDP and transformers. With
    truncated sampling, whose kept ids the engine returns.
    """
    options = {"learning_rate": 1e-2, "num_threads": 1, "zero_stage": 3}
    assert_trains(
        tmp_path,
        sglang(),
        TRUNCATED,
        trainer={"backend": "deepspeed", "ranks": 2, "options": options},
        **ON_RAY,
    )


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_megatron_ranks_and_vllm(tmp_path: Path) -> None:
    """Two tensor parallel ranks send their own parts, which vLLM's side puts together; two names differ from a run on
    FSDP and transformers. The reference is one rank of FSDP.
    """
    options = {"learning_rate": 1e-2, "num_threads": 1, "tensor_parallel": 2, "sequence_parallel": True}
    steps = assert_trains(
        tmp_path,
        {"backend": "vllm", "options": {"num_threads": 1}, "engine": {"kv_cache_memory_bytes": 64 << 20}},
        trainer={"backend": "megatron", "ranks": 2, "options": options},
        roles={"reference": OTHER_TRAINER},
        algorithm={"name": "grpo", "options": {"group_size": 4, "kl_coef": 0.1, "kl_placement": "reward"}},
        **ON_RAY,
        weight_sync={"backend": "broadcast", "export": "boxes"},
    )
    assert_starts_at_the_reference(steps)


ADAPTED = [(128, 128), (128, 64), (128, 64), (128, 128), (128, 128), (128, 128), (128, 128)]
"""Inputs and outputs of the linear layers in each of the two layers of the tiny model."""


@pytest.mark.engine
@pytest.mark.slow
def test_grpo_with_adapters_of_megatron_ranks_and_vllm(tmp_path: Path) -> None:
    """Only the adapters of two tensor parallel ranks travel; the reference is the model without them."""
    options = {"learning_rate": 1e-2, "num_threads": 1, "tensor_parallel": 2, "lora": {"rank": 4, "alpha": 8.0}}
    served = {"num_threads": 1, "lora": {"max_rank": 8}}
    steps = assert_trains(
        tmp_path,
        {"backend": "vllm", "options": served, "engine": {"kv_cache_memory_bytes": 64 << 20}},
        trainer={"backend": "megatron", "ranks": 2, "options": options},
        roles={"reference": OTHER_TRAINER},
        algorithm={"name": "grpo", "options": {"group_size": 4, "kl_coef": 0.1, "kl_placement": "reward"}},
        **ON_RAY,
        weight_sync={"backend": "broadcast", "payload": "adapter"},
    )
    assert_starts_at_the_reference(steps)
    in_layer = sum(4 * (inputs + outputs) for inputs, outputs in ADAPTED)
    assert {step["sync/bytes"] for step in steps} == {2 * in_layer * 4}


@pytest.mark.engine
def test_a_run_goes_on_with_another_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From FSDP to Megatron after two of three steps: the weights are the same to the bit, and so are the prompts."""
    first = yaml.safe_load(configuration(tmp_path, {"backend": "transformers"}, {}))
    first["checkpoint"] = {"every": 1, "keep_last": 3}
    train_to(first, tmp_path / "run", 2)
    there = tmp_path / "run" / "checkpoints" / "step_00000002"
    second = deepcopy(first)
    second["roles"]["trainer"]["backend"] = "megatron"
    second |= {"output_dir": str(tmp_path / "continued"), "train": first["train"] | {"steps": 2}}
    file = tmp_path / "second.yaml"
    file.write_text(yaml.safe_dump(second))
    with pytest.raises(
        CheckpointError, match=r"differs in more than its trainers:\n  sampling.max_tokens: was 12, is 8"
    ):
        convert(there, file, ["sampling.max_tokens=8"])
    convert(there, file)
    assert f"chatlearn run {file}" in capsys.readouterr().err

    train_to(second, tmp_path / "continued", 2)
    assert "optimizers of trainer and their learning-rate schedules start anew" in (
        tmp_path / "continued" / "events.jsonl"
    ).read_text(encoding="utf-8")
    for name, tensor in read_checkpoint(tmp_path / "run" / "model").items():
        assert torch.equal(tensor, read_checkpoint(tmp_path / "continued" / "model")[name]), name

    train_to(first, tmp_path / "run", 3)
    train_to(second, tmp_path / "continued", 3)
    asked = [prompts_of(tmp_path / name, 3) for name in ("run", "continued")]
    assert asked[0] == asked[1]
    assert asked[0]
    with pytest.raises(ConfigError, match="already holds a run"):
        convert(there, file)


def train_to(content: dict[str, Any], output: Path, steps: int) -> None:
    content = content | {"output_dir": str(output), "train": content["train"] | {"steps": steps}}
    registry = discover_plugins()
    asyncio.run(Run(assemble(load_config(yaml.safe_dump(content), [], registry), registry)).train())


def prompts_of(run: Path, step: int) -> list[str]:
    """Ids of the prompts that a step sampled."""
    return sorted({row["group"] for row in rollouts_of(run, step)})


def vllm(host: str) -> dict[str, Any]:
    """A generator role."""
    options = {"host": host, "num_threads": 1}
    return {"backend": "vllm", "options": options, "engine": {"kv_cache_memory_bytes": 64 << 20}}


def sglang() -> dict[str, Any]:
    """A generator role."""
    return {"backend": "sglang", "options": {"python": sglang_python()}}


def sglang_python() -> str:
    """The interpreter that has SGLang; skips where there is none."""
    built = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
    python = os.environ.get("CHATLEARN_SGLANG_PYTHON", str(built))
    if not Path(python).is_file():
        pytest.skip(f"no interpreter with SGLang at {python}: run `make install-engines`")
    return python


def assert_starts_at_the_reference(steps: list[dict[str, float]]) -> None:
    """Two backends read the same weights: the divergence is 0 until the policy learns."""
    assert abs(steps[0]["reward_kl"]) < 1e-6
    assert steps[-1]["reward_kl"] > 1e-3


def assert_trains(
    tmp_path: Path, generator: dict[str, Any], sampling: dict[str, Any] | None = None, **settings: Any
) -> list[dict[str, float]]:
    """Each step learns something, and what the engine says of its tokens is what the trainer says."""
    steps = train(tmp_path, generator, sampling or {}, **settings)
    for step in steps:
        assert step["mismatch/logprob_diff_max"] < MISMATCH
        assert step["rollout/staleness_max"] == 0
    return steps


def assert_trains_asynchronously(
    tmp_path: Path, generator: dict[str, Any], sampling: dict[str, Any], **settings: Any
) -> dict[str, list[tuple[int, int]]]:
    """Rollouts are made a step ahead; nothing is lost, and every token has the version and the logprob of the weights
    that sampled it. Expected are plain transformers forwards with the weights of every version, from the disk.

    Returns:
        Request -> the versions of its tokens, each with the token where it ends.
    """
    steps = train(
        tmp_path,
        generator,
        sampling,
        algorithm={"name": "grpo", "options": {"group_size": 4, "importance_correction": "truncate"}},
        rollout={"mode": "async", "max_staleness": 1},
        checkpoint={"every": 1, "keep_last": STEPS, "export": False},
        **settings,
    )
    record = [json.loads(line) for line in (tmp_path / "run" / "admissions.jsonl").read_text().splitlines()]
    versions = {line["request"]: line["ends"] for line in record if "request" in line}
    models = [policy_of_version(tmp_path, version) for version in range(STEPS)]
    trained: list[str] = []
    for number, step in enumerate(steps):
        assert step["rollout/staleness_max"] == min(number, 1)
        assert step["rollout/dropped_stale"] == step["samples/excluded"] == 0
        rows = rollouts_of(tmp_path / "run", number + 1)
        trained += [row["id"] for row in rows]
        weights: list[float] = []
        for row in rows:
            assert not row["excluded"]
            by_version = [logprobs(model, row, sampling.get("temperature", 1.0)) for model in models]
            sampled, start = [], 0
            for version, stop in versions[row["id"]]:
                assert number - 1 <= version <= number, "no older than max_staleness, and none from the future"
                sampled += by_version[version][start:stop]
                start = stop
            assert start == len(row["token_ids"])
            assert row["generator_logprobs"] == pytest.approx(sampled, abs=MISMATCH), row["id"]
            assert row["trainer_logprobs"] == pytest.approx(by_version[number], abs=MISMATCH), row["id"]
            weights += [min(2.0, math.exp(new - old)) for new, old in zip(by_version[number], sampled, strict=True)]
        assert step["policy/importance_weight"] == pytest.approx(sum(weights) / len(weights), abs=1e-3)
    assert len(set(trained)) == len(trained) == 4 * 4 * STEPS, "each sample is trained on once"
    stale = steps[-1]["mismatch/stale_logprob_diff_max"]
    assert stale > 100 * MISMATCH, "the weights of two versions differ, so a wrong version would show"
    return versions


def policy_of_version(tmp_path: Path, version: int) -> PreTrainedModel:
    """The policy after so many steps: from FSDP's checkpoint, or what the weight sync of ``EVERY_VERSION`` kept."""
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    if version:
        found = model.load_state_dict(read_checkpoint(weights_of_version(tmp_path / "run", version)), strict=False)
        assert not found.unexpected_keys
        assert set(found.missing_keys) <= {"lm_head.weight"}, "tied to the embedding"
        model.tie_weights()
    return model


def weights_of_version(run: Path, version: int) -> Path:
    """The directory of their safetensors files."""
    kept = {json.loads(file.read_text())["policy_version"]: file.parent for file in run.rglob("chatlearn_weights.json")}
    return kept.get(version, run / "checkpoints" / f"step_{version:08d}" / "roles" / "trainer")


def logprobs(model: PreTrainedModel, row: dict[str, Any], temperature: float) -> list[float]:
    """Of the tokens of a completion."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
    ids = torch.tensor([[*prompt, *row["token_ids"]]])
    with torch.no_grad():
        found = (model(ids).logits[0] / temperature).log_softmax(-1)
    return found[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


def rollouts_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The samples of a step."""
    lines = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train(tmp_path: Path, generator: dict[str, Any], sampling: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """The metrics of each step."""
    registry = discover_plugins()
    config = configuration(tmp_path, generator, sampling, **settings)
    assembly = assemble(load_config(config, [], registry), registry)
    with listening_meanwhile() as found:
        asyncio.run(Run(assembly).train("never"))
    if "runtime" not in settings:  # Ray's own servers, which ask for its token, listen everywhere: test_listeners.py
        assert not reached_from_outside(found), "SECURITY.md says that engines listen on loopback"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == STEPS
    assert steps[0]["policy/grad_norm"] > 0, "nothing was learned, so nothing was shown"
    return steps
