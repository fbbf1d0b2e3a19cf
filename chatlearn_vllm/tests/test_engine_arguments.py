from __future__ import annotations

import dataclasses
import re

import pytest

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_vllm.engine_arguments import CPU_KV_CACHE_BYTES, OWNED, engine_arguments
from chatlearn_vllm.engine_side.arguments import engine_args
from chatlearn_vllm.options import LoraOptions, VLLMGeneratorOptions


def arguments(engine=None, *, device="cpu", max_length=None, **options):
    context = RoleContext(
        "actor", ModelSource("m", "t", max_length=max_length), device=device, engine_arguments=engine or {}, seed=3
    )
    return engine_arguments(VLLMGeneratorOptions(**options), context)


def test_what_the_run_says_becomes_engine_arguments():
    found = arguments(max_length=256, logprobs="raw", lora=LoraOptions(max_rank=8))
    assert found["model"] == "m"
    assert found["tokenizer"] == "t"
    assert found["max_model_len"] == 256
    assert found["logprobs_mode"] == "raw_logprobs"
    assert found["seed"] == 3
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, 8)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16"), ("cuda:1", "bfloat16")])
def test_the_type_follows_the_device(device, dtype):
    assert arguments(device=device)["dtype"] == dtype
    assert arguments(device=device, dtype="float16")["dtype"] == "float16"


def test_what_the_engine_is_given_wins_over_the_runs_defaults_and_not_over_options():
    found = arguments({"dtype": "float16", "max_model_len": 64}, max_length=256)
    assert (found["dtype"], found["max_model_len"]) == ("float16", 64)
    with pytest.raises(ConfigError, match=r"dtype: 'float16', and options\.dtype is 'float32'; remove one of them"):
        arguments({"dtype": "float16"}, dtype="float32")


def test_defaults_for_a_cpu_can_be_overruled():
    assert arguments()["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    assert arguments()["enforce_eager"] is True
    assert "kv_cache_memory_bytes" not in arguments({"gpu_memory_utilization": 0.3})
    assert arguments({"kv_cache_memory_bytes": 5, "enforce_eager": False})["kv_cache_memory_bytes"] == 5
    assert "enforce_eager" not in arguments(device="cuda")
    assert arguments(device="cuda")["enable_sleep_mode"] is True


def test_parallel_and_other_arguments_pass_as_they_are():
    given = {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
        "quantization": "fp8",
    }
    assert arguments(given, device="cuda").items() >= given.items()
    assert arguments(given, device="cuda")["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in arguments()
    asked = arguments(given | {"distributed_executor_backend": "ray"}, device="cuda")
    assert asked["distributed_executor_backend"] == "ray"


def test_expert_parallelism_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match=r"enable_expert_parallel: on a CPU vLLM 0\.32 .* remove it"):
        arguments({"enable_expert_parallel": True})
    assert "enable_expert_parallel" in arguments({"enable_expert_parallel": False})


def test_every_argument_of_the_backends_own_is_named_with_the_remedy():
    with pytest.raises(ConfigError) as caught:
        arguments({"model": "x", "data_parallel_size": 2})
    assert re.findall(r"  (\w+): owned by the backend; (.*)", str(caught.value)) == [
        ("model", "set model.path"),
        ("data_parallel_size", OWNED["data_parallel_size"]),
    ]
    assert "set roles.<role>.replicas" in OWNED["data_parallel_size"]
    assert "roles.actor.engine" in str(caught.value)


def test_a_role_without_a_model_is_named():
    with pytest.raises(BackendError, match=r"roles\.actor\.model\.path"):
        engine_arguments(VLLMGeneratorOptions(), RoleContext("actor"))


@pytest.mark.engine
def test_owned_names_are_the_engines(model_dir):
    from vllm.engine.arg_utils import EngineArgs

    assert OWNED.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert engine_args({"model": str(model_dir()), "max_num_seqs": 3}).max_num_seqs == 3
