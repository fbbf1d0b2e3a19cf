from __future__ import annotations

import dataclasses
import json
import re

import pytest

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_vllm.engine_arguments import (
    CPU_KV_CACHE_BYTES,
    OWNED,
    RANK_VARIABLES,
    data_parallel_size,
    engine_arguments,
    num_workers,
)
from chatlearn_vllm.engine_side.arguments import engine_args
from chatlearn_vllm.options import LoraOptions, VLLMGeneratorOptions


def arguments(engine=None, *, model="m", device="cpu", max_length=None, **options):
    context = RoleContext(
        "actor",
        ModelSource(str(model), "t", max_length=max_length),
        device=device,
        engine_arguments=engine or {},
        seed=3,
    )
    return engine_arguments(VLLMGeneratorOptions(**options), context)


def test_run_settings_become_engine_arguments():
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


def test_engine_settings_override_defaults_but_not_options():
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
        arguments({"model": "x", "data_parallel_rank": 2})
    assert re.findall(r"  (\w+): owned by the backend; (.*)", str(caught.value)) == [
        ("model", "set model.path"),
        ("data_parallel_rank", OWNED["data_parallel_rank"]),
    ]
    assert "set only data_parallel_size" in OWNED["data_parallel_rank"]
    assert "roles.actor.engine" in str(caught.value)


def model_with(directory, **config):
    (directory / "config.json").write_text(json.dumps({"architectures": ["A"], "hidden_size": 8} | config))
    return directory


@pytest.mark.parametrize(
    "config", [{"num_experts": 8}, {"text_config": {"n_routed_experts": 8}}, {"block_configs": [{"num_experts": 2}]}]
)
def test_ranks_that_share_experts_are_counted_and_left_to_the_host(config, tmp_path):
    given = {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    assert (data_parallel_size(given), num_workers(given)) == (2, 12)
    found = arguments(given, model=model_with(tmp_path, **config))
    assert found["distributed_executor_backend"] == "mp"
    assert "data_parallel_size" not in found


def test_ranks_of_a_dense_model_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data_parallel_size: 2 ranks .*none.*dense models; multiply roles\.<role>\.replicas by 2"
    ):
        arguments({"data_parallel_size": 2}, model=model_with(tmp_path))
    arguments({"data_parallel_size": 1}, model=tmp_path)
    arguments({"data_parallel_size": 2}, model=tmp_path / "a-name-on-the-hub")


def test_workers_of_several_ranks_are_processes(tmp_path):
    given = {"data_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(
        ConfigError, match=r"distributed_executor_backend: 'ray', and data_parallel_size is 2.*remove it"
    ):
        arguments(given, model=model_with(tmp_path, num_experts=4))
    arguments(given | {"distributed_executor_backend": "mp"}, model=model_with(tmp_path, num_experts=4))


@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True])
def test_an_invalid_number_of_ranks_is_refused(size):
    with pytest.raises(ConfigError, match=rf"data_parallel_size: {size!r} is not a whole number, 1 or more"):
        arguments({"data_parallel_size": size})


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_rank_variables_in_the_environment_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=rf"data_parallel_size: {name} in the environment .* unset them"):
        arguments()


def test_a_role_without_a_model_is_named():
    with pytest.raises(BackendError, match=r"roles\.actor\.model\.path"):
        engine_arguments(VLLMGeneratorOptions(), RoleContext("actor"))


@pytest.mark.engine
def test_owned_names_are_the_engines(model_dir):
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    assert OWNED.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert "data_parallel_size" not in OWNED
    assert {name for name in vars(envs)["environment_variables"] if name.startswith("VLLM_DP_")} == set(RANK_VARIABLES)
    assert engine_args({"model": str(model_dir()), "max_num_seqs": 3}).max_num_seqs == 3
