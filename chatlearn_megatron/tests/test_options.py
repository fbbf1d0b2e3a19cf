"""Options and models that do not fit are refused with the numbers and what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from chatlearn_core.exceptions import ConfigError, ModelError
from chatlearn_core.protocols import ModelSource, RoleContext
from chatlearn_hf.tiny import build_tiny_model
from chatlearn_megatron.engine_arguments import check_engine_arguments
from chatlearn_megatron.options import MegatronOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_pipeline": 2}, "virtual_pipeline 2 .* pipeline_parallel is 1"),
        ({"sequence_parallel": True}, "tensor_parallel is 1"),
        ({"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 1}, "needs sequence_parallel: true"),
        ({"expert_tensor_parallel": 2}, "expert_tensor_parallel 2 does not divide tensor_parallel 1"),
        ({"tensor_paralel": 2}, "tensor_paralel"),
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
    check_engine_arguments("trainer", {"attention_softmax_in_fp32": True}, {"attention_softmax_in_fp32"})
    with pytest.raises(ConfigError, match=r"hidden_size: owned by the backend; the model's config.json sets it"):
        check_engine_arguments("trainer", {"hidden_size": 3})
    with pytest.raises(ConfigError, match="moe_z_loss_coef: unknown; did you mean 'moe_z_loss_coeff'"):
        check_engine_arguments("trainer", {"moe_z_loss_coef": 0.1}, {"moe_z_loss_coeff"})


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "qwen3",
            {"tensor_parallel": 3},
            r"(?s)divide the model's 4 query heads; it may be 1, 2, 4.*2 key-value heads",
        ),
        ("qwen3", {"expert_parallel": 2}, "the model has no experts"),
        ("qwen3_moe", {"tensor_parallel": 2}, "with experts needs sequence_parallel: true"),
        ("qwen3", {"pipeline_parallel": 3}, "does not divide the model's 2 layers; it may be 1, 2"),
    ],
)
def test_layouts_that_do_not_divide_the_model(
    family: str, options: dict[str, int], message: str, tmp_path: Path
) -> None:
    from chatlearn_hf.model_directory import load_config
    from chatlearn_megatron.families import family_of
    from chatlearn_megatron.model import check_sizes

    config = load_config(str(build_tiny_model(tmp_path, family)))  # type: ignore[arg-type]
    arguments = family_of(config, str(tmp_path)).arguments(config)
    with pytest.raises(ModelError, match=message):
        check_sizes(arguments, config.vocab_size, MegatronOptions(**options), str(tmp_path))  # type: ignore[arg-type]


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
def test_a_missing_part_of_a_model_is_found_at_the_start(tmp_path: Path) -> None:
    """A family that forgets biases would train without them and export others."""
    import dataclasses

    from chatlearn_megatron import families
    from chatlearn_megatron.trainer import MegatronTrainer

    path = str(build_tiny_model(tmp_path, "qwen2"))
    known = families.FAMILIES[0]

    def arguments(config: object) -> dict[str, object]:
        return known.arguments(config) | {"add_qkv_bias": False}

    families_without = (dataclasses.replace(known, arguments=arguments),)
    trainer = MegatronTrainer(MegatronOptions(), RoleContext("trainer", ModelSource(path, path)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "FAMILIES", families_without)
        with pytest.raises(ModelError, match=r"self_attn.q_proj.bias \[64\]: 0 elements"):
            trainer.setup()
    trainer.close()
