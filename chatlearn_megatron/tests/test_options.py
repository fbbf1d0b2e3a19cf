"""Options and models that do not fit are refused with the numbers and what would fit."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError, ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_megatron.engine_arguments import (
    DDP,
    MODEL,
    OPTIMIZER,
    RECORDED_VERSION,
    check_engine_arguments,
    engine_problems,
)
from chatlearn_megatron.layouts import (
    OPTIONS,
    ModelSizes,
    adapted_modules,
    adapter_problems,
    layout_of,
    layout_problems,
    nearest_layouts,
    refusal,
    sizes_of_arguments,
    sizes_of_config,
)
from chatlearn_megatron.options import MegatronOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_pipeline": 2}, "virtual_pipeline 2 .* pipeline_parallel is 1"),
        ({"sequence_parallel": True}, "tensor_parallel is 1"),
        ({"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}, "needs sequence_parallel: true"),
        ({"expert_tensor_parallel": 2}, "expert_tensor_parallel 2 does not divide tensor_parallel 1"),
        ({"tensor_paralel": 2}, "tensor_paralel"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout is 0.1, .* set lora.dropout: 0, or use backend: fsdp"),
    ],
)
def test_combinations_that_do_not_exist(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MegatronOptions(**options)  # type: ignore[arg-type]


def test_sizes_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ValidationError, match=r"is 6, which does not divide the role's ranks: 8; .* such as 6"):
        MegatronOptions.model_validate({"tensor_parallel": 2, "pipeline_parallel": 3}, context={"ranks": 8})
    assert MegatronOptions(tensor_parallel=2, pipeline_parallel=2).data_parallel(8) == 2


def test_engine_arguments() -> None:
    check_engine_arguments("trainer", {"moe_expert_capacity_factor": 2.0, "ddp": {"bucket_size": 1000}})
    problems = engine_problems(
        {
            "hidden_size": 3,
            "moe_expert_capacity_facto": 0.1,
            "attention_dropout": 0.1,
            "cp_comm_type": "p2p",
            "apply_rope_fusion": True,
            "optimizer": {"lr": 0.1, "decoupled_weight_decay": False},
            "ddp": 3,
        }
    )
    assert problems["hidden_size"] == "owned by the backend; the model's config.json sets it"
    assert "did you mean 'moe_expert_capacity_factor'" in problems["moe_expert_capacity_facto"]
    assert "does not read it" in problems["attention_dropout"]
    assert problems["optimizer.lr"] == "owned by the backend; set options.learning_rate and the options beside it"
    assert "must be a mapping of fields of DistributedDataParallelConfig" in problems["ddp"]
    assert problems.keys() >= {"cp_comm_type", "apply_rope_fusion"}
    assert len(problems) == 7
    with pytest.raises(
        ConfigError, match=r"optimizer.lr: owned .*\n  it passes: .*; optimizer: decoupled_weight_decay"
    ):
        check_engine_arguments("trainer", {"optimizer": {"lr": 0.1}})


@pytest.mark.engine
def test_every_field_of_megatron_core_is_passed_or_refused() -> None:
    """The record is that of the installed version, so that no argument is unknown to the plan alone."""
    import dataclasses
    from importlib.metadata import version

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    assert version("megatron-core") == RECORDED_VERSION
    for section, config in (
        (MODEL, MLATransformerConfig),
        (OPTIMIZER, OptimizerConfig),
        (DDP, DistributedDataParallelConfig),
    ):
        assert {*section.passed, *section.refused} == {field.name for field in dataclasses.fields(config)}
        assert not {*section.passed} & section.refused.keys()


@pytest.mark.engine
def test_the_cpu_layer_refuses_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    from chatlearn_core.exceptions import BackendError
    from chatlearn_megatron import cpu_compatibility

    monkeypatch.setattr(cpu_compatibility, "version", lambda name: "0.17.0")
    monkeypatch.setattr(cpu_compatibility, "_MODULES", ("nothing.is_imported",))
    with pytest.raises(BackendError, match=r"megatron-core 0\.17\.0 is installed.*pip install megatron-core==0\.16\.1"):
        cpu_compatibility.install()


DENSE = ModelSizes(query_heads=4, key_heads=2, layers=4, vocabulary=300, widths={"MLP width": 96})
MIXTURE = ModelSizes(4, 2, 6, 300, {"MLP width": 96}, experts=8, expert_width=24)


@pytest.mark.parametrize(
    ("sizes", "ranks", "options", "message"),
    [
        (
            DENSE,
            4,
            {"tensor_parallel": 4},
            r"(?s)tensor_parallel 4 does not divide the model's 2 key-value heads; it may be 1, 2\n"
            r"nearest layouts of 4 ranks that fit: \{tensor_parallel: 2\}; .*; ",
        ),
        (DENSE, 2, {"expert_parallel": 2}, "the model has no experts"),
        (
            MIXTURE,
            2,
            {"tensor_parallel": 2},
            "(?s)with experts needs .* fit: {tensor_parallel: 2, sequence_parallel: true}",
        ),
        (
            DENSE,
            6,
            {"pipeline_parallel": 3},
            "(?s)3 does not divide the model's 4 layers; it may be 1, 2, 4.*6 ranks that fit: {pipeline_parallel: 2}; ",
        ),
        (
            MIXTURE,
            8,
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "(?s)4 does not divide the model's 6 layers.*al_pipeline: 3",
        ),
    ],
)
def test_layouts_that_do_not_divide_the_model(
    sizes: ModelSizes, ranks: int, options: dict[str, int], message: str
) -> None:
    assert re.search(message, "\n".join(refusal(sizes, MegatronOptions(**options), ranks)))  # type: ignore[arg-type]


@given(
    st.builds(
        ModelSizes,
        query_heads=st.sampled_from([4, 6, 8]),
        key_heads=st.sampled_from([1, 2]),
        layers=st.sampled_from([2, 6]),
        vocabulary=st.just(300),
        experts=st.sampled_from([0, 4]),
        expert_width=st.just(24),
    ),
    st.sampled_from([1, 4, 6, 8]),
    st.tuples(*[st.integers(1, 4)] * 5),
)
def test_the_nearest_layouts_are_those_that_the_options_take(
    sizes: ModelSizes, ranks: int, wanted: tuple[int, int, int, int, int]
) -> None:
    """Against a loop over all sizes, with the options' own checks."""

    def change(layout: tuple[int, ...]) -> float:
        return sum(abs(math.log2(new / old)) for new, old in zip(layout, target, strict=True))

    target = (*wanted, wanted[0])
    fitting = []
    for layout in itertools.product(range(1, ranks + 1), range(1, ranks + 1), (1, 2, 3, 6), *[range(1, ranks + 1)] * 2):
        for etp in range(1, layout[0] + 1) if sizes.experts else [layout[0]]:
            named = dict(zip(OPTIONS, (*layout, etp), strict=True)) | {"sequence_parallel": layout[0] > 1}
            if math.prod(layout[:2]) * layout[3] > ranks or math.prod((layout[1], layout[4], etp)) > ranks:
                continue
            try:
                options = MegatronOptions.model_validate(named, context={"ranks": ranks})
            except ValidationError:
                continue
            if not layout_problems(sizes, layout_of(options), options.sequence_parallel):
                fitting.append(layout_of(options))
    found = nearest_layouts(sizes, target, ranks)
    assert set(found) <= set(fitting)
    assert [round(change(one), 5) for one in found] == sorted(round(change(one), 5) for one in fitting)[:3]


@pytest.mark.engine
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt2", "deepseek_v3", "mistral"])
def test_the_plan_sees_the_sizes_that_the_run_has(family: str) -> None:
    from transformers import AutoConfig

    from chatlearn_megatron.families import family_of

    config = AutoConfig.for_model(family)
    assert sizes_of_config(config.to_dict()) == sizes_of_arguments(
        family_of(config, "model").arguments(config), config.vocab_size
    )
    assert sizes_of_config({"model_type": "acme", "vocab_size": 3}) is None


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt2", "deepseek_v3", "mistral")),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
    ],
)
def test_the_plan_sees_the_modules_that_can_have_adapters(family: str, fields: dict[str, object]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from chatlearn_megatron.adapters import adaptable_weights
    from chatlearn_megatron.families import family_of

    config = AutoConfig.for_model(family, num_hidden_layers=2, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = adaptable_weights(model, family_of(config, "model").places(config), 2)
    planned = adapted_modules(config.to_dict())
    assert planned is not None
    assert {name.split(".")[-2] for name in found} == set(planned)
    assert adapted_modules({"model_type": "acme"}) is None


@pytest.mark.parametrize(
    ("family", "targets", "lines"),
    [
        ("qwen3", "all-linear", []),
        ("qwen3", ["q_proj", "mlp.up_proj"], []),
        ("qwen3", ["c_attn", "lm_head"], [r"'c_attn' .* may be q_proj, k_proj, .*down_proj", "'lm_head' names no"]),
        ("gpt2", ["q_proj"], ["'q_proj' names no linear layer .* it may be c_attn, c_proj, c_fc"]),
        ("qwen3_moe", ["gate_proj"], ["'gate_proj' names no .* it may be q_proj, k_proj, v_proj, o_proj$"]),
        ("deepseek_v3", "all-linear", ["includes latent attention, .* may be o_proj.*backend: fsdp"]),
        ("qwen3_moe", "all-linear", []),
        ("deepseek_v3", ["kv_b_proj"], ["'kv_b_proj' names no linear layer"]),
        ("acme", ["anything"], []),
    ],
)
def test_adapters_that_the_plan_refuses(family: str, targets: object, lines: list[str]) -> None:
    options = MegatronOptions.model_validate({"lora": {"target_modules": targets}})
    found = adapter_problems(options, {"model_type": family})
    assert len(found) == len(lines)
    for line, pattern in zip(found, lines, strict=True):
        assert re.search(pattern, line)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"lora": {"target_modules": ["c_attn"]}}, "matches no module .* linear layers are .*q_proj"),
        ("llama", {"lora": {"target_modules": ["lm_head"]}}, "no adapters for lm_head of .* mlp.down_proj, .*not for"),
        (
            "qwen3",
            {"lora": {"target_modules": ["layers.0.self_attn.q_proj"]}, "pipeline_parallel": 2},
            "the layers 1 to 1 of .* one of 2 parts, get no adapters",
        ),
    ],
)
def test_adapters_that_the_start_refuses(family: str, options: dict[str, object], message: str, tmp_path: Path) -> None:
    from chatlearn_hf.lora import LoraSettings
    from chatlearn_hf.meta_start import build_on_meta
    from chatlearn_megatron.adapters import choose_adapters
    from chatlearn_megatron.families import family_of

    model = build_on_meta(build_tiny_model(tmp_path, family, tie=False), attention="eager")
    chosen = MegatronOptions(**options)  # type: ignore[arg-type]
    assert chosen.lora is not None
    settings, places = LoraSettings.of(chosen.lora), family_of(model.config, "model").places(model.config)
    with pytest.raises(ModelError, match=message):
        choose_adapters(model, settings, places, 2, chosen.pipeline_parallel, "it")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}, "chooses 2 experts of 2 groups out of 4"),
        ({"n_group": 1, "norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"n_group": 1, "attention_bias": True}, "no bias there"),
    ],
)
def test_routing_that_megatron_core_computes_otherwise(fields: dict[str, object], message: str) -> None:
    from transformers import AutoConfig

    from chatlearn_megatron.families import family_of

    config = AutoConfig.for_model("deepseek_v3", **fields)
    with pytest.raises(ModelError, match=message):
        family_of(config, "model").arguments(config)


@pytest.mark.engine
def test_an_unknown_architecture_names_those_that_are_known(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from chatlearn_megatron.families import family_of

    with pytest.raises(
        ModelError,
        match=r"type 'mamba'; .* deepseek_v3, gpt2, llama, mistral, qwen2, qwen3, qwen3_moe.*chatlearn_model_families",
    ):
        family_of(AutoConfig.for_model("mamba"), "a/model")


@pytest.mark.engine
def test_two_trainers_of_a_process_need_one_layout(tmp_path: Path) -> None:
    from chatlearn_core.exceptions import BackendError
    from chatlearn_megatron.trainer import MegatronTrainer

    path = str(build_tiny_model(tmp_path))
    source = ModelSource(path, path)
    first = MegatronTrainer(MegatronOptions(), RoleContext("trainer", source, trainable=True))
    first.setup()
    try:
        second = MegatronTrainer(MegatronOptions(), RoleContext("reference", source))
        second.setup()
        second.close()
        other = MegatronTrainer(
            MegatronOptions(tensor_parallel=2),
            RoleContext("critic", source, world_size=2, rendezvous="tcp://127.0.0.1:1"),
        )
        with pytest.raises(BackendError, match=r"role 'critic' asks for Megatron ranks .* separate processes"):
            other.setup()
        assert first.health() is None
    finally:
        first.close()


@pytest.mark.engine
def test_a_missing_part_of_a_model_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that forgets biases would train without them and export others."""
    import dataclasses

    from chatlearn_megatron import families
    from chatlearn_megatron.trainer import MegatronTrainer

    path = str(build_tiny_model(tmp_path, "qwen2"))
    known = families.LLAMA

    def arguments(config: object) -> dict[str, object]:
        return known.arguments(config) | {"add_qkv_bias": False}

    monkeypatch.setattr(families, "LLAMA", dataclasses.replace(known, arguments=arguments))
    trainer = MegatronTrainer(MegatronOptions(), RoleContext("trainer", ModelSource(path, path)))
    with pytest.raises(ModelError, match=r"self_attn.q_proj.bias \[64\]: 0 elements"):
        trainer.setup()
    trainer.close()
