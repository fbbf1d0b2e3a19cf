"""Checks engine arguments: fields of Megatron-Core's ``TransformerConfig``. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from chatlearn_core.exceptions import ConfigError

_MODEL = "the model's config.json sets it"
OWNED: Mapping[str, str] = {
    "tensor_model_parallel_size": "set options.tensor_parallel",
    "pipeline_model_parallel_size": "set options.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "set options.virtual_pipeline",
    "context_parallel_size": "set options.context_parallel",
    "expert_model_parallel_size": "set options.expert_parallel",
    "expert_tensor_parallel_size": "set options.expert_tensor_parallel",
    "sequence_parallel": "set options.sequence_parallel",
    "recompute_granularity": "set options.gradient_checkpointing",
    "recompute_method": "set options.gradient_checkpointing",
    "recompute_num_layers": "set options.gradient_checkpointing",
    "bf16": "set options.param_dtype",
    "fp16": "set options.param_dtype: bfloat16",
    "params_dtype": "set options.param_dtype",
    "pipeline_dtype": "set options.param_dtype",
    "variable_seq_lengths": "rows are packed, so their lengths always vary",
    "calculate_per_token_loss": "losses are sums with a denominator of their own",
    "finalize_model_grads_func": "this backend sets it",
    "grad_scale_func": "this backend sets it",
    "no_sync_func": "set options.overlap",
    "grad_sync_func": "set options.overlap",
    "param_sync_func": "set options.overlap",
    "num_layers": _MODEL,
    "hidden_size": _MODEL,
    "num_attention_heads": _MODEL,
    "num_query_groups": _MODEL,
    "kv_channels": _MODEL,
    "ffn_hidden_size": _MODEL,
    "normalization": _MODEL,
    "layernorm_epsilon": _MODEL,
    "activation_func": _MODEL,
    "gated_linear_unit": _MODEL,
    "add_bias_linear": _MODEL,
    "add_qkv_bias": _MODEL,
    "qk_layernorm": _MODEL,
    "num_moe_experts": _MODEL,
    "moe_router_topk": _MODEL,
    "moe_ffn_hidden_size": _MODEL,
    "moe_layer_freq": _MODEL,
    "multi_latent_attention": _MODEL,
    "q_lora_rank": _MODEL,
    "kv_lora_rank": _MODEL,
    "qk_head_dim": _MODEL,
    "qk_pos_emb_head_dim": _MODEL,
    "v_head_dim": _MODEL,
    "rope_type": _MODEL,
    "mscale_all_dim": _MODEL,
    "rotary_scaling_factor": _MODEL,
    "moe_shared_expert_intermediate_size": _MODEL,
    "moe_router_score_function": _MODEL,
    "moe_router_num_groups": _MODEL,
    "moe_router_group_topk": _MODEL,
    "moe_router_topk_scaling_factor": _MODEL,
    "moe_router_enable_expert_bias": _MODEL,
}
"""Arguments that this backend sets itself, each with the setting to use instead."""


def engine_problems(arguments: Mapping[str, Any], fields: Collection[str] | None = None) -> dict[str, str]:
    """Return each argument that cannot be passed on, with the reason and the remedy; see ``TrainerSpec.check_engine``.

    Args:
        arguments: content of ``roles.<role>.engine``.
        fields: fields of ``TransformerConfig``; None if they are unknown here: then any other name is accepted.
    """
    problems: dict[str, str] = {}
    for name in arguments:
        if name in OWNED:
            problems[name] = f"owned by the backend; {OWNED[name]}"
        elif fields is not None and name not in fields:
            near = difflib.get_close_matches(name, [*fields], n=1)
            problems[name] = "unknown" + (f"; did you mean {near[0]!r}?" if near else "")
    return problems


def check_engine_arguments(role: str, arguments: Mapping[str, Any], fields: Collection[str] | None = None) -> None:
    """Refuse arguments that cannot be passed on.

    Raises:
        ConfigError: names every argument that is unknown or set by this backend, with the remedy.
    """
    problems = engine_problems(arguments, fields)
    if problems:
        raise ConfigError(
            f"roles.{role}.engine holds arguments that the trainer 'megatron' does not pass to Megatron-Core's"
            " TransformerConfig:\n" + "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
        )
