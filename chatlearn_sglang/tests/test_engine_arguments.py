from __future__ import annotations

import sys

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_sglang.engine_arguments import (
    ADAPTER_VARIABLE,
    OWNED,
    check_arguments,
    core_shares,
    environment,
    interpreter,
    owned_arguments,
)
from chatlearn_sglang.generator import SGLangGenerator
from chatlearn_sglang.options import LoraOptions, SGLangGeneratorOptions

OPTIONS = SGLangGeneratorOptions(python=sys.executable)


def test_arguments_that_the_backend_sets_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangGenerator(OPTIONS, RoleContext("actor", engine_arguments={"dtype": "half", "weight_version": "1"}))
    message = str(caught.value)
    assert "roles.actor.engine holds arguments" in message
    assert "dtype: owned by the backend; set options.dtype" in message
    assert "weight_version: owned by the backend" in message
    check_arguments("actor", {"tp_size": 2, "dp_size": 1, "ep_size": 1}, cpu=True)
    check_arguments("actor", {"tp_size": 2, "ep_size": 2, "attn_dp_size": 2}, cpu=False)
    check_arguments("actor", {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, cpu=False)


def test_an_engine_of_several_data_parallel_ranks_is_refused_since_it_takes_no_weights() -> None:
    with pytest.raises(ConfigError, match=r"dp_size: 2; SGLang .* set roles\.actor\.replicas"):
        SGLangGenerator(OPTIONS, RoleContext("actor", engine_arguments={"dp_size": 2}))


def test_arguments_that_crash_sglang_on_a_cpu_are_refused_there() -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangGenerator(OPTIONS, RoleContext("actor", engine_arguments={"ep_size": 2, "attn_dp_size": 2}))
    assert "ep_size: 2; on a CPU SGLang" in str(caught.value)
    assert "attn_dp_size: 2; on a CPU SGLang" in str(caught.value)


def test_everything_the_adapter_sets_is_listed_as_owned() -> None:
    context = RoleContext("actor", ModelSource("m", "t"), device="cuda:3", seed=7)
    owned = owned_arguments(context, OPTIONS, dtype="bfloat16", model_length=100)
    assert set(owned) <= set(OWNED)
    assert owned["device"] == "cuda"
    assert owned["base_gpu_id"] == 3
    assert owned["context_length"] > 100
    lora = SGLangGeneratorOptions(python=sys.executable, lora=LoraOptions(max_rank=4))
    with_lora = owned_arguments(context, lora, dtype="bfloat16", model_length=100, lora_targets=["q_proj"])
    assert set(with_lora) <= set(OWNED)
    assert (with_lora["max_lora_rank"], with_lora["lora_target_modules"]) == (4, ["q_proj"])
    assert environment(lora, {}, cpu=False).keys() - environment(OPTIONS, {}, cpu=False).keys() == {ADAPTER_VARIABLE}
    assert "base_gpu_id" not in owned_arguments(
        RoleContext("actor", ModelSource("m", "t"), device="cuda"), OPTIONS, dtype="bfloat16", model_length=100
    )


def test_without_sglang_here_an_interpreter_must_be_named(monkeypatch) -> None:
    monkeypatch.setattr("chatlearn_sglang.engine_arguments.DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ConfigError, match=r"roles\.actor\.options\.python is not set and SGLang is not installed"):
        interpreter(SGLangGeneratorOptions(), "actor")
    assert interpreter(OPTIONS, "actor") == sys.executable
    monkeypatch.setattr("chatlearn_sglang.engine_arguments.DISTRIBUTION", "torch")
    assert interpreter(SGLangGeneratorOptions(), "actor") == sys.executable


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3, 8], 2, "0,1|2,3"), ([5], 2, "5|5"), ([0, 1], 4, "0|1|0|1")],
)
def test_tensor_parallel_ranks_share_the_cores(cores, ranks, shares) -> None:
    assert core_shares(cores, ranks) == shares


def test_the_configuration_overrides_environment_variables(monkeypatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    options = SGLangGeneratorOptions(environment={"TOKENIZERS_PARALLELISM": "true", "X": "1"})
    found = environment(options, {"tp_size": 2}, cpu=True)
    assert found["SGLANG_USE_CPU_ENGINE"] == "1"
    assert found["TOKENIZERS_PARALLELISM"] == "true"
    assert found["X"] == "1"
    assert "|" in str(found["SGLANG_CPU_OMP_THREADS_BIND"])
    assert "SGLANG_USE_CPU_ENGINE" not in environment(options, {}, cpu=False)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(options, {"tp_size": 2}, cpu=True)
