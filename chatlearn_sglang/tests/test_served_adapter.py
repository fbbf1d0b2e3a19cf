from __future__ import annotations

from typing import Any

import pytest

from chatlearn_core.types import TensorSpec, WeightManifest
from chatlearn_sglang.served_adapter import AdapterTerms, ServedAdapter, served_adapter, target_modules

LAYER = "model.layers.0"
SHAPES = {
    "self_attn.q_proj": (8, 6),
    "self_attn.k_proj": (4, 6),
    "self_attn.v_proj": (4, 6),
    "self_attn.o_proj": (6, 8),
    "mlp.gate_proj": (10, 6),
    "mlp.up_proj": (10, 6),
    "mlp.down_proj": (6, 10),
}
CONFIG: dict[str, Any] = {"r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False, "rank_pattern": {}}


def manifest(shapes: dict[str, tuple[int, ...]], adapter: dict[str, Any] | None = None) -> WeightManifest:
    return WeightManifest({n: TensorSpec(n, s, "bfloat16") for n, s in shapes.items()}, adapter=adapter)


MODEL = manifest(
    {f"{LAYER}.{name}.weight": shape for name, shape in SHAPES.items()}
    | {"model.embed_tokens.weight": (20, 6), "lm_head.weight": (20, 6), f"{LAYER}.input_layernorm.weight": (6,)}
)


def offer(*modules: str, rank: int = 2, **config: Any) -> WeightManifest:
    """An adapter of these modules, as peft saves it."""
    tensors = {}
    for module in modules:
        out, into = SHAPES[module]
        tensors[f"base_model.model.{LAYER}.{module}.lora_A.weight"] = (rank, into)
        tensors[f"base_model.model.{LAYER}.{module}.lora_B.weight"] = (out, rank)
    return manifest(tensors, CONFIG | {"r": rank} | config)


def serve(offered: WeightManifest, max_rank: int = 8) -> ServedAdapter:
    return served_adapter(offered, MODEL, AdapterTerms(target_modules(MODEL), max_rank))


def test_every_linear_layer_may_have_an_adapter_except_in_models_with_experts() -> None:
    assert target_modules(MODEL) == tuple(sorted(name.rpartition(".")[2] for name in SHAPES))
    expert = {f"{LAYER}.mlp.experts.0.down_proj.weight": TensorSpec("", (6, 10), "bfloat16")}
    moe = WeightManifest({**MODEL.tensors, **expert})
    assert target_modules(moe) == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_missing_parts_of_a_fused_layer_are_zero() -> None:
    served = serve(offer("self_attn.v_proj", "mlp.up_proj", "self_attn.o_proj"))
    shapes = {name.removeprefix(f"base_model.model.{LAYER}."): shape for name, _, shape in served.absent}
    assert shapes == {
        "self_attn.q_proj.lora_A.weight": [2, 6],
        "self_attn.q_proj.lora_B.weight": [8, 2],
        "self_attn.k_proj.lora_A.weight": [2, 6],
        "self_attn.k_proj.lora_B.weight": [4, 2],
        "mlp.gate_proj.lora_A.weight": [2, 6],
        "mlp.gate_proj.lora_B.weight": [10, 2],
    }
    assert {dtype for _, dtype, _ in served.absent} == {"bfloat16"}
    assert serve(offer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")).absent == []


def test_the_scale_is_peft_s() -> None:
    assert serve(offer("mlp.down_proj")).configuration == {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4.0,
        "target_modules": list(target_modules(MODEL)),
    }
    stabilised = serve(offer("mlp.down_proj", rank=4, use_rslora=True))
    assert stabilised.alpha / stabilised.rank == 4 / 4**0.5


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (offer("mlp.down_proj", rank=16), r"adapter_config\.r: rank 16, above options\.lora\.max_rank 8"),
        (offer("mlp.down_proj", use_dora=True), r"adapter_config\.use_dora: True, which SGLang ignores"),
        (offer("mlp.down_proj", alpha_pattern={"x": 1}), r"alpha_pattern: \{'x': 1\}, which SGLang ignores"),
        (offer("mlp.down_proj", bias="lora_only"), r"bias: 'lora_only', which SGLang ignores"),
        (offer(), "the adapter has no tensors"),
    ],
)
def test_settings_that_sglang_ignores_are_refused(offered: WeightManifest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(offered)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"base_model.model.{LAYER}.mlp.gone_proj.lora_A.weight", (2, 6), "matches no linear layer"),
        (f"base_model.model.{LAYER}.input_layernorm.lora_A.weight", (2, 6), "matches no linear layer"),
        (f"base_model.model.{LAYER}.mlp.up_proj.lora_magnitude_vector", (2,), "matches no linear layer"),
        ("base_model.model.lm_head.lora_A.weight", (2, 6), "serves adapters only for down_proj, .*, v_proj, outside"),
        (f"base_model.model.{LAYER}.mlp.up_proj.lora_A.weight", (3, 6), r"shape \[3, 6\] offered, \[2, 6\] expected"),
        (f"base_model.model.{LAYER}.mlp.up_proj.lora_A.weight", (2, 6), r"mlp\.up_proj: only lora_A is offered"),
    ],
)
def test_a_tensor_that_fits_no_layer_is_refused_by_name(name: str, shape: tuple[int, ...], message: str) -> None:
    good = offer("mlp.down_proj")
    bad = WeightManifest({**good.tensors, name: TensorSpec(name, shape, "bfloat16")}, adapter=good.adapter)
    with pytest.raises(ValueError, match=message):
        serve(bad)
