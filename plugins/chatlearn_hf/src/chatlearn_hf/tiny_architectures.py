"""Builds a tiny random model of any causal model type of transformers, by shrinking its default configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from chatlearn_core.protocols import Head
from chatlearn_hf.heads import HEAD_CLASSES

WINDOW = 6
"""Tokens of every sliding window; the original context of length-dependent rotary embeddings is twice as long."""
VOCAB_SIZE = 97
LAYERS = 4
HALF_HEAD = 4
"""Number of rotary frequencies of a head."""
MAX_PARAMETERS = 20_000_000

SMALL: dict[str, Any] = {
    field: value
    for value, fields in {
        VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
        32: "hidden_size n_embd d_model dim embedding_dim emb_dim embedding_size input_embedding_size lru_width"
        " output_embedding_size word_embed_proj_dim attention_hidden_size backbone_hidden_size attention_dim",
        48: "intermediate_size ffn_dim n_inner d_inner d_ff dff dim_ff ffn_hidden_size feed_forward_size"
        " decoder_ffn_dim encoder_ffn_dim intermediate_size_mlp dense_intermediate_size",
        24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
        " moe_shared_expert_intermediate_size expert_ffn_hidden_size linear_intermediate_size",
        LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_blocks"
        " num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"
        " num_decoder_attention_heads swa_num_attention_heads encoder_attention_heads num_encoder_attention_heads"
        " num_experts num_local_experts n_routed_experts moe_num_experts linear_num_heads"
        " linear_num_value_heads num_query_groups mamba_num_heads n_mamba_heads ",
        8: "head_dim kv_channels attention_head_dim attention_head_size dim_head v_head_dim qk_rope_head_dim"
        " d_head swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim q_lora_rank"
        " kv_lora_rank o_lora_rank mamba_head_dim ssm_state_size state_size mamba_d_state time_step_rank mamba_dt_rank"
        " hidden_size_per_layer_input laurel_rank adapter_rank router_hidden_size hc_lowrank gated_norm_rank"
        " d_rel rel_extent query_pre_attn_scalar dim_model_base chunk_size mamba_chunk_size block_size",
        2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk"
        " moe_k linear_num_key_heads index_topk_blocks",
        1: "encoder_layers num_encoder_layers n_group topk_group n_groups mamba_n_groups mamba_ngroups"
        " first_k_dense_replace num_expert_group num_dense_layers o_groups moe_layer_start_index",
        # With few heads many tokens score exactly 0, and the choice of a sparse attention among equals is undefined.
        16: "index_n_heads indexer_n_heads",
        128: "max_position_embeddings n_positions max_seq_len n_ctx context_length model_max_length"
        " max_target_positions max_source_positions max_inference_chunksize",
        WINDOW: "sliding_window window_size sliding_window_size attention_window_size local_attention"
        " attention_chunk_size index_topk keep_window_size",
        2 * WINDOW: "original_max_position_embeddings",
        0.1: "initializer_range init_std",
    }.items()
    for field in fields.split()
} | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "qk_nope_head_dim": HALF_HEAD,
    "rotary_dim": HALF_HEAD,
}
"""Small values of configuration fields, for configurations that have them."""

DECODER = {"is_decoder": True, "use_sliding_window": True, "sliding_window": WINDOW, "pad_token_id": 0}
"""Fields other than sizes that ``tiny_config`` sets."""

NOT_SETTINGS = frozenset(
    [
        "transformers_version",
        "architectures",
        "dtype",
        "model_type",
        "_name_or_path",
        "id2label",
        "label2id",
        "attention_layers",
        "qk_head_dim",
        "mamba_headdim",
        "hybrid_layer_ids",
    ]
)
"""Configuration fields that are not settings of the architecture: origin, and values derived from settings."""

LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Fields with the type of each layer; every type of the default configuration is kept."""

GEMMA4: dict[str, Any] = {
    "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 2.0,
}

OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "logit_scale": 0.5,
        "sliding_window": None,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 24},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma2": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "final_logit_softcapping": 2.0,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granite": {"logits_scaling": 3.0},
    "granite_swa": {"logits_scaling": 3.0},
    "granitemoe": {"logits_scaling": 3.0},
    "granitemoe_swa": {"logits_scaling": 3.0},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"] * 2,
        "logits_scaling": 3.0,
    },
    "granitemoeshared": {"logits_scaling": 3.0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "hash_seed": 0},
    "vaultgemma": {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": {"num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}
"""Additional or replacing fields of single model types; scales and soft caps are such that losing one
changes results."""


DYNAMIC_ROPE: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 2.0, 3.0, 5.0],
    "original_max_position_embeddings": 2 * WINDOW,
    "factor": 4.0,
    "short_mscale": 1.0,
    "long_mscale": 1.3,
}
"""Length-dependent rotary embeddings, for heads with eight dimensions."""


def causal_model_types() -> list[str]:
    """Return the model types of ``AutoModelForCausalLM``."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **fields: Any) -> Any:
    """Return the type's default configuration with every size shrunk, as a decoder, with windows where possible."""
    config = AutoConfig.for_model(model_type)
    small = _small(config) | {name: value for name, value in DECODER.items() if name in config.to_dict()}
    return AutoConfig.for_model(model_type, **(small | OWN.get(model_type, {}) | fields))


def build_tiny(model_type: str, attention: str = "eager", head: Head = "lm", **fields: Any) -> PreTrainedModel:
    """Build a random float32 model in evaluation mode; the global random state is unchanged.

    Norms are drawn around 1 and biases around 0, so that a mistake in either changes the results.

    Args:
        model_type: see ``causal_model_types``.
        attention: transformers' name of an attention implementation.
        head: head of the model.
        **fields: configuration fields that replace the shrunk ones.

    Raises:
        ValueError: even the shrunk model has more than ``MAX_PARAMETERS``. transformers raises its own errors for
            inconsistent configurations.
    """
    config = tiny_config(model_type, **fields)
    if head != "lm":
        config.num_labels = 1
    return _build_random(HEAD_CLASSES[head].from_config, config, attention)


def build_stand_in(model: PreTrainedModel) -> PreTrainedModel:
    """Build a tiny random float32 CPU model of another model's class and settings, to show effects of these settings.

    Its windows have ``WINDOW`` tokens, and its rotary embeddings an original context of ``2 * WINDOW``. Raises the
    errors of ``build_tiny``.
    """
    config = model.config
    small = _small(config)
    heads = config.get_text_config().to_dict()
    if heads.get("num_key_value_heads") == heads.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    kept = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_SETTINGS}
    shrunk: Any = type(config)(**(kept | small | OWN.get(config.model_type, {})))
    if hasattr(config, "num_labels"):
        shrunk.num_labels = config.num_labels
    return _build_random(type(model)._from_config, shrunk, config._attn_implementation)


def _build_random(of_config: Callable[..., PreTrainedModel], config: Any, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(int(parameter.numel()) for parameter in of_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{config.model_type} has {size} parameters with every size shrunk")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = of_config(config, dtype=torch.float32, attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if "bias" in name else 1.0
                nn.init.uniform_(parameter, centre - 0.2, centre + 0.2)
    model.eval()  # type: ignore[no-untyped-call]  # transformers does not annotate it
    return model


def _small(config: Any) -> dict[str, Any]:
    default = config.to_dict()
    chosen: dict[str, Any] = {}
    for name, value in default.items():
        sub: Any = getattr(config, name, None) if isinstance(value, dict) else None
        if hasattr(sub, "to_dict"):
            chosen[name] = _small(sub) | OWN.get(sub.model_type, {})
            continue
        if name in SMALL and value is not None:
            chosen[name] = SMALL[name]
        elif name in LAYER_LISTS and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            chosen[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
        elif isinstance(value, list) and value and len(value) == default.get("num_hidden_layers"):
            chosen[name] = value[-LAYERS:]
        elif name == "rope_parameters" and isinstance(value, dict):
            chosen[name] = _small_rope(value)
    if "kv_lora_rank" in default:  # multi-head latent attention has a key for each query head
        chosen["num_key_value_heads"] = SMALL["num_attention_heads"]
    if "'dynamic'" in str(chosen.get("rope_parameters")):
        chosen["max_position_embeddings"] = SMALL["original_max_position_embeddings"]
    return chosen


def _small_rope(value: dict[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict):
            small[name] = _small_rope(entry)
        elif name == "original_max_position_embeddings":
            small[name] = SMALL[name]
        elif name in ("short_factor", "long_factor"):
            small[name] = [float(factor) for factor in entry[:HALF_HEAD]]
        elif name == "mrope_section":
            small[name] = [HALF_HEAD - len(entry) + 1, *[1] * (len(entry) - 1)]
        else:
            small[name] = entry
    return small
