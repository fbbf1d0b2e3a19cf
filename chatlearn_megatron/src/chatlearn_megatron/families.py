"""Architectures that Megatron-Core can compute, each as a record: its configuration and its parameters' places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from chatlearn_core.exceptions import ModelError, PluginError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import ModelFamilySpec
from chatlearn_megatron.pieces import Part, Place

TRAINER = "megatron"
"""Name under which plugins register layouts for this trainer."""
DISTRIBUTION = "chatlearn-megatron"


@dataclass(slots=True, frozen=True)
class MegatronFamily:
    """One architecture, or several with the same parameters."""

    model_types: tuple[str, ...]
    """``model_type`` values of transformers configurations."""
    arguments: Callable[[Any], dict[str, Any]]
    """Fields of ``TransformerConfig`` for a transformers configuration."""
    places: Callable[[Any], Mapping[str, Place]]
    """Name of each parameter of Megatron-Core's ``GPTModel``, and of each buffer that checkpoints hold -> its place,
    for a transformers configuration. ``{layer}`` and ``{expert}`` stand for indices in the whole model, in these names
    and those of checkpoint tensors."""
    rotary: bool = True
    """Whether positions are rotary; otherwise they are learned."""


def _gelu_tanh(values: Tensor) -> Tensor:
    return functional.gelu(values, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ModelError(
            f"the model's activation is {name!r}; the trainer 'megatron' has {', '.join(sorted(ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


def _named(kind: Any, *names: str, **how: bool) -> Place:
    return Place(kind, tuple(Part(name) for name in names), **how)


# Llama and its descendants


def _llama_arguments(config: Any) -> dict[str, Any]:
    biases = [name for name in ("mlp_bias",) if getattr(config, name, False)]
    if config.model_type in ("llama", "mistral") and getattr(config, "attention_bias", False):
        biases.append("attention_bias")
    if biases:
        raise ModelError(
            f"{' and '.join(biases)} of this {config.model_type} model: the trainer 'megatron' has no bias there"
        )
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": _activation(config.hidden_act),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        "qk_layernorm": config.model_type.startswith("qwen3"),
    }


def _llama_places(config: Any) -> dict[str, Place]:
    own, hf = "decoder.layers.{layer}.", "model.layers.{layer}."
    attention = hf + "self_attn."
    return {
        "embedding.word_embeddings.weight": _named("rows", "model.embed_tokens.weight"),
        own + "input_layernorm.weight": _named("whole", hf + "input_layernorm.weight"),
        own + "self_attention.linear_qkv.weight": _named("qkv", *(f"{attention}{x}_proj.weight" for x in "qkv")),
        own + "self_attention.linear_qkv.bias": _named("qkv", *(f"{attention}{x}_proj.bias" for x in "qkv")),
        own + "self_attention.q_layernorm.weight": _named("whole", attention + "q_norm.weight"),
        own + "self_attention.k_layernorm.weight": _named("whole", attention + "k_norm.weight"),
        own + "self_attention.linear_proj.weight": _named("columns", attention + "o_proj.weight"),
        own + "pre_mlp_layernorm.weight": _named("whole", hf + "post_attention_layernorm.weight"),
        own + "mlp.linear_fc1.weight": _named("gated", hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"),
        own + "mlp.linear_fc2.weight": _named("columns", hf + "mlp.down_proj.weight"),
        "decoder.final_layernorm.weight": _named("whole", "model.norm.weight"),
        "output_layer.weight": _named("rows", "lm_head.weight"),
        "score.weight": _named("whole", "score.weight"),
        "score.bias": _named("whole", "score.bias"),
    }


def _qwen3_moe_arguments(config: Any) -> dict[str, Any]:
    def is_mixture(layer: int) -> bool:
        return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0

    return _llama_arguments(config) | {
        "num_moe_experts": config.num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(is_mixture(layer)) for layer in range(config.num_hidden_layers)],
        # Softmax over the chosen experts equals softmax over all, divided by the sum of the chosen ones.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _qwen3_moe_places(config: Any) -> dict[str, Place]:
    own, hf = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    expert, of_expert = own + "experts.local_experts.{expert}.", hf + "experts.{expert}."
    return _llama_places(config) | {
        own + "router.weight": _named("whole", hf + "gate.weight"),
        expert + "linear_fc1.weight": _named(
            "gated", of_expert + "gate_proj.weight", of_expert + "up_proj.weight", expert=True
        ),
        expert + "linear_fc2.weight": _named("columns", of_expert + "down_proj.weight", expert=True),
    }


# DeepSeek-V3, Moonlight


def _deepseek_v3_arguments(config: Any) -> dict[str, Any]:
    groups, chosen = config.n_group or 1, config.topk_group or 1
    # Megatron-Core judges a group by its best experts_per_token / chosen_groups experts, the architecture by two.
    if groups > 1 and config.num_experts_per_tok // chosen != 2:
        raise ModelError(
            f"this {config.model_type} model chooses {config.num_experts_per_tok} experts of {chosen} groups out of"
            f" {groups}; the trainer 'megatron' computes two experts of each chosen group, or no groups (n_group: 1)"
        )
    if config.num_experts_per_tok > 1 and not config.norm_topk_prob:
        raise ModelError(
            f"norm_topk_prob is false in this {config.model_type} model; the trainer 'megatron' normalises the weights"
            " of the chosen experts"
        )
    if config.attention_bias:
        raise ModelError(f"attention_bias of this {config.model_type} model: the trainer 'megatron' has no bias there")
    rope = config.rope_parameters
    scaled = rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.v_head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "activation_func": _activation(config.hidden_act),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        # Angles are those of transformers; these two scale the scores.
        "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if scaled else 0.0,
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_layer_freq": [int(layer >= config.first_k_dense_replace) for layer in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the bias is the checkpoint's
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _deepseek_v3_places(config: Any) -> dict[str, Place]:
    own, hf = "decoder.layers.{layer}.", "model.layers.{layer}."
    attention, of_attention = own + "self_attention.", hf + "self_attn."
    shared, of_shared = own + "mlp.shared_experts.", hf + "mlp.shared_experts."
    return _qwen3_moe_places(config) | {
        attention + "linear_q_proj.weight": _named("rows", of_attention + "q_proj.weight"),
        attention + "linear_q_down_proj.weight": _named("rows", of_attention + "q_a_proj.weight"),
        attention + "q_layernorm.weight": _named("whole", of_attention + "q_a_layernorm.weight"),
        attention + "linear_q_up_proj.weight": _named("rows", of_attention + "q_b_proj.weight"),
        attention + "linear_kv_down_proj.weight": _named("rows", of_attention + "kv_a_proj_with_mqa.weight"),
        attention + "kv_layernorm.weight": _named("whole", of_attention + "kv_a_layernorm.weight"),
        attention + "linear_kv_up_proj.weight": _named("rows", of_attention + "kv_b_proj.weight"),
        own + "mlp.router.expert_bias": _named("whole", hf + "mlp.gate.e_score_correction_bias"),
        shared + "linear_fc1.weight": _named("gated", of_shared + "gate_proj.weight", of_shared + "up_proj.weight"),
        shared + "linear_fc2.weight": _named("columns", of_shared + "down_proj.weight"),
    }


# GPT-2


def _gpt2_arguments(config: Any) -> dict[str, Any]:
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        raise ModelError(
            "this GPT-2 model scales attention scores in a way that the trainer 'megatron' does not compute"
        )
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "num_query_groups": config.n_head,
        "kv_channels": config.n_embd // config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "normalization": "LayerNorm",
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": _activation(config.activation_function),
        "gated_linear_unit": False,
        "add_bias_linear": True,
    }


def _gpt2_places(config: Any) -> dict[str, Place]:
    own, hf, width = "decoder.layers.{layer}.", "transformer.h.{layer}.", config.n_embd
    places = {
        "embedding.word_embeddings.weight": _named("rows", "transformer.wte.weight"),
        "embedding.position_embeddings.weight": _named("whole", "transformer.wpe.weight"),
        own + "self_attention.linear_proj.weight": _named("columns", hf + "attn.c_proj.weight", transposed=True),
        own + "self_attention.linear_proj.bias": _named("whole", hf + "attn.c_proj.bias"),
        own + "mlp.linear_fc1.weight": _named("rows", hf + "mlp.c_fc.weight", transposed=True),
        own + "mlp.linear_fc1.bias": _named("rows", hf + "mlp.c_fc.bias"),
        own + "mlp.linear_fc2.weight": _named("columns", hf + "mlp.c_proj.weight", transposed=True),
        own + "mlp.linear_fc2.bias": _named("whole", hf + "mlp.c_proj.bias"),
        "output_layer.weight": _named("rows", "lm_head.weight"),
    }
    for kind in ("weight", "bias"):
        fused = tuple(Part(f"{hf}attn.c_attn.{kind}", number * width) for number in range(3))
        places[f"{own}self_attention.linear_qkv.{kind}"] = Place("qkv", fused, transposed=kind == "weight")
        places[f"{own}input_layernorm.{kind}"] = _named("whole", f"{hf}ln_1.{kind}")
        places[f"{own}pre_mlp_layernorm.{kind}"] = _named("whole", f"{hf}ln_2.{kind}")
        places[f"decoder.final_layernorm.{kind}"] = _named("whole", f"transformer.ln_f.{kind}")
        places[f"score.{kind}"] = _named("whole", f"score.{kind}")
    return places


LLAMA = MegatronFamily(("llama", "mistral", "qwen2", "qwen3"), _llama_arguments, _llama_places)
QWEN3_MOE = MegatronFamily(("qwen3_moe",), _qwen3_moe_arguments, _qwen3_moe_places)
DEEPSEEK_V3 = MegatronFamily(("deepseek_v3",), _deepseek_v3_arguments, _deepseek_v3_places)
GPT2 = MegatronFamily(("gpt2",), _gpt2_arguments, _gpt2_places, rotary=False)


def family_of(config: Any, path: str) -> MegatronFamily:
    """Return the family that a plugin registers for a transformers configuration (``ModelFamilySpec.layouts``).

    Another distribution's family takes precedence over one of this package, for the same type.

    Args:
        config: the configuration.
        path: model directory, for the message.

    Raises:
        ModelError: none has this model type.
        PluginError: two other distributions have one, or what is registered is no ``MegatronFamily``.
    """
    registry = discover_plugins()
    records = [record for record in registry.records("model_family") if isinstance(record, ModelFamilySpec)]
    records = [record for record in records if TRAINER in record.layouts]
    claims = [record for record in records if config.model_type in record.model_types]
    others = [record for record in claims if not registry.origin(record).startswith(f"{DISTRIBUTION} ")]
    if len(others) > 1:
        raise PluginError(
            f"{' and '.join(sorted(map(registry.origin, others)))} register layouts of models of type"
            f" {config.model_type!r} for the trainer 'megatron'; disable all but one (CHATLEARN_DISABLE_PLUGINS)"
        )
    for record in (*others, *claims):
        return _registered(record.layouts[TRAINER], registry.origin(record))
    supported = {name for record in records for name in record.model_types}
    raise ModelError(
        f"{path} is a model of type {config.model_type!r}; the trainer 'megatron' has {', '.join(sorted(supported))}."
        " Use backend: fsdp, which trains every causal model of transformers, or a plugin that registers the type with"
        " the hook chatlearn_model_families (layouts)"
    )


def _registered(text: str, origin: object) -> MegatronFamily:
    """Import the family that a plugin names."""
    try:
        family = resolve_import_string(text)
    except Exception as error:  # the plugin's own code runs
        raise PluginError(
            f"{origin}: the layout {text!r} for the trainer 'megatron' cannot be imported: {error}"
        ) from error
    if not isinstance(family, MegatronFamily):
        raise PluginError(
            f"{origin}: the layout {text!r} for the trainer 'megatron' is a {type(family).__name__}; it must be a"
            " chatlearn_megatron.families.MegatronFamily"
        )
    return family
