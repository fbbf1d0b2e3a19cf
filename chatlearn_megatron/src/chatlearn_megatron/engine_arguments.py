"""Checks engine arguments: native settings of Megatron-Core 0.16.1. Imports nothing heavy.

``roles.<role>.engine`` takes fields of ``TransformerConfig``, and in its sections ``optimizer`` and ``ddp`` those of
``OptimizerConfig`` and ``DistributedDataParallelConfig``. Megatron-Core reads many fields only in layers, optimizers or
schedules that this trainer does not run. These are refused, because they would have no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatlearn_core.exceptions import ConfigError

RECORDED_VERSION = "0.16.1"
"""The version of megatron-core whose fields are recorded here."""

_MODEL = "the model's config.json sets it"
_SCHEDULE = "options.virtual_pipeline decides it"
_READ = "weights are read from the model directory"

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
    "overlap_p2p_comm": _SCHEDULE,
    "batch_p2p_comm": _SCHEDULE,
    "moe_token_dispatcher_type": "'alltoall' is the only one for rows of varying lengths",
    "use_cpu_initialization": _READ,
    "perform_initialization": _READ,
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
"""Fields of ``TransformerConfig`` that this backend sets itself, each with the setting to use instead."""

PASSED = (
    "batch_p2p_sync",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "clone_scatter_output_in_embedding",
    "config_logger_dir",
    "deallocate_pipeline_outputs",
    "deterministic_mode",
    "disable_bf16_reduced_precision_matmul",
    "gradient_accumulation_fusion",
    "microbatch_group_size_per_vp_stage",
    "moe_expert_capacity_factor",
    "moe_layer_recompute",
    "moe_pad_expert_input_to_capacity",
    "moe_shared_expert_overlap",
    "moe_token_drop_policy",
)
"""Fields of ``TransformerConfig`` that are passed on."""

_REFUSED: Mapping[str, str] = {
    "attention over packed rows is this trainer's own, which does not read it": """
        apply_query_key_layer_scaling attention_backend attention_dropout attention_output_gate
        attention_softmax_in_fp32 batch_invariant_mode cp_comm_type flash_decode hierarchical_context_parallel_sizes
        hybrid_context_parallel log_max_attention_logit masked_softmax_fusion max_seqlen_per_dp_cp_rank qk_clip
        qk_clip_alpha qk_clip_threshold softmax_scale softmax_type test_mode window_attn_skip_freq window_size""",
    "rotary embeddings are those of the transformers architecture, which do not read it": """
        apply_rope_fusion beta_fast beta_slow fused_single_qkv_rope mrope_section mscale no_rope_freq
        original_max_position_embeddings rotary_base rotary_interleaved rotary_percent""",
    "norms are torch's, which do not read it": """
        layernorm_zero_centered_gamma memory_efficient_layer_norm persist_layer_norm qk_l2_norm""",
    _READ: """
        embedding_init_method embedding_init_method_std init_method init_method_std init_model_with_meta_device
        output_layer_init_method""",
    "it would change what the model in its directory computes": """
        activation_func_clamp_value apply_residual_connection_post_layernorm fp32_residual_connection
        glu_linear_offset moe_apply_probs_on_input moe_input_jitter_eps moe_latent_size moe_router_dtype
        moe_router_force_load_balancing moe_router_load_balancing_type moe_router_pre_softmax moe_shared_expert_gate
        moe_enable_routing_replay use_fused_weighted_squared_relu""",
    "Megatron-Core scales this loss for an average over tokens, and losses here are parts of a global sum": """
        moe_aux_loss_coeff moe_z_loss_coeff mtp_loss_scaling_factor""",
    "the bias by which experts are chosen stays the checkpoint's": "moe_router_bias_update_rate",
    "checkpoints do not hold the random state of dropout": "hidden_dropout",
    "layers are divided evenly over stages": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage pipeline_model_parallel_layout""",
    "the schedule for packed rows does not use it": """
        barrier_with_L1_time mtp_standalone overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend timers
        use_ring_exchange_p2p""",
    "logprobs are computed by this trainer, which does not read it": """
        cross_entropy_fusion_impl cross_entropy_loss_fusion defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "options.gradient_checkpointing recomputes whole layers": """
        distribute_saved_activations fine_grained_activation_offloading min_offloaded_tensor_size
        num_microbatches_with_partial_activation_checkpoints offload_modules recompute_modules""",
    "options.param_dtype decides it": "autocast_dtype enable_autocast",
    "CUDA graphs need rows of one length": """
        cuda_graph_impl cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph""",
    "only layers of TransformerEngine read it, and this trainer runs them without it": """
        activation_func_fp8_input_store cpu_offloading cpu_offloading_activations cpu_offloading_double_buffering
        cpu_offloading_num_layers cpu_offloading_weights _cpu_offloading_context delay_wgrad_compute
        disable_parameter_transpose_cache ep_overlap_early_attn_memory_release first_last_layers_bf16 fp4 fp4_param
        fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention
        fp8_interval fp8_margin fp8_multi_head_attention fp8_param fp8_quantizer_factory fp8_recipe fp8_wgrad
        kitchen_attention_backend moe_grouped_gemm moe_permute_fusion moe_router_fusion moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_use_legacy_grouped_gemm num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 overlap_moe_expert_parallel_comm quant_recipe symmetric_ar_type
        tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad
        tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red transformer_impl use_kitchen
        use_kitchen_attention use_te_activation_func use_te_rng_tracker""",
    "it belongs to another token dispatcher than 'alltoall'": """
        moe_deepep_num_sms moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms""",
    "it belongs to inference": """
        cache_mla_latents inference_fuse_tp_communication inference_rng_tracker inference_sampling_seed
        mlp_chunks_for_prefill use_inference_optimized_layers""",
    "it belongs to an architecture that this trainer does not have": """
        dsa_indexer_head_dim dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_topk dsa_indexer_use_sparse_loss
        experimental_attention_variant heterogeneous_block_specs hetereogenous_dist_checkpoint is_hybrid_model
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim mtp_num_layers
        use_mamba_mem_eff_path""",
    f"Megatron-Core {RECORDED_VERSION} does not read it": """
        async_tensor_model_parallel_allreduce moe_extended_tp moe_per_layer_logging moe_router_topk_limited_devices
        moe_token_dropping""",
}
"""Reason -> fields of ``TransformerConfig`` that would have no effect, or a wrong one."""

_LEARNING = "set options.learning_rate and the options beside it"
_REDUCED = "gradients are summed in float32, and nothing is averaged"
_LIBRARY = "it needs TransformerEngine's optimizer, whose state the checkpoints do not hold"
_FLOAT16 = "it belongs to float16, which this trainer does not have"
_FSDP = "it belongs to Megatron-FSDP, which this trainer does not run"
_CHECKED = "every update's losses and gradient norm are checked"


@dataclass(slots=True, frozen=True)
class Section:
    """Fields of one of Megatron-Core's configurations: those passed on, and for each other one why not."""

    of: str
    """Name of the class."""
    passed: tuple[str, ...]
    refused: Mapping[str, str]
    """Field -> reason and remedy; an owned one says what to set instead."""

    def problem(self, name: str) -> str | None:
        """Return why an argument cannot be passed on; None if it can."""
        if name in self.passed:
            return None
        if name in self.refused:
            return self.refused[name]
        near = difflib.get_close_matches(name, [*self.passed, *self.refused], n=1)
        return f"unknown to {self.of} of Megatron-Core {RECORDED_VERSION}" + (
            f"; did you mean {near[0]!r}?" if near else ""
        )


def _owned(of: Mapping[str, str]) -> dict[str, str]:
    return {name: f"owned by the backend; {remedy}" for name, remedy in of.items()}


def _by_reason(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


MODEL = Section("TransformerConfig", PASSED, _owned(OWNED) | _by_reason(_REFUSED))
OPTIMIZER = Section(
    "OptimizerConfig",
    ("decoupled_weight_decay",),
    _owned(
        {
            "optimizer": "set options.optimizer",
            "weight_decay": "set options.weight_decay",
            "adam_beta1": "set options.adam_beta1",
            "adam_beta2": "set options.adam_beta2",
            "adam_eps": "set options.adam_epsilon",
            "sgd_momentum": "set options.momentum",
            "clip_grad": "set options.grad_clip",
            "bf16": "set options.param_dtype",
            "fp16": "set options.param_dtype: bfloat16",
            "params_dtype": "set options.param_dtype",
            "use_distributed_optimizer": "set options.distributed_optimizer",
            "overlap_param_gather": "set options.overlap",
        }
        | dict.fromkeys(("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"), _LEARNING)
    )
    | _by_reason(
        {
            "norms and biases have no weight decay": "apply_wd_to_qk_layernorm",
            "weights are gathered during the next forward pass (options.overlap)": (
                "overlap_param_gather_with_optimizer_step"
            ),
            _LIBRARY: """exp_avg_dtype exp_avg_sq_dtype fp8_recipe main_grads_dtype main_params_dtype
                reuse_grad_buf_for_mxfp8_param_ag store_param_remainders use_precision_aware_optimizer""",
            _FLOAT16: "hysteresis initial_loss_scale loss_scale loss_scale_window min_loss_scale",
            "the optimizers here are adamw and sgd": """muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum
                muon_num_ns_steps muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov""",
            "checkpoints do not hold the state of an optimizer that is partly on the host": """optimizer_cpu_offload
                optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params
                use_torch_optimizer_for_cpu_offload""",
            "this trainer's update does not read it": """barrier_with_L1_time config_logger_dir log_num_zeros_in_grad
                timers""",
        }
    ),
)
DDP = Section(
    "DistributedDataParallelConfig",
    ("bucket_size", "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation"),
    _owned(
        {
            "grad_reduce_in_fp32": _REDUCED,
            "average_in_collective": _REDUCED,
            "overlap_grad_reduce": "set options.overlap",
            "overlap_param_gather": "set options.overlap",
            "align_param_gather": "set options.overlap; stages gather as they need",
            "use_distributed_optimizer": "set options.distributed_optimizer",
        }
    )
    | _by_reason(
        {
            "the optimizer's state is sharded over all data parallel ranks": "num_distributed_optimizer_instances",
            _CHECKED: "check_for_large_grads check_for_nan_in_grad",
            "buffers of NCCL are not used": "disable_symmetric_registration nccl_ub",
            "only layers of TransformerEngine read it, and this trainer runs them without it": """delay_wgrad_compute
                fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag""",
            _FSDP: """data_parallel_sharding_strategy fsdp_double_buffer fsdp_manual_registration
                gradient_reduce_div_fusion keep_fp8_transpose_cache outer_dp_sharding_strategy preserve_fp32_weights
                suggested_communication_unit_size use_custom_fsdp use_megatron_fsdp""",
        }
    ),
)
SECTIONS: Mapping[str, Section] = {"optimizer": OPTIMIZER, "ddp": DDP}
"""Sections of ``engine`` beside the fields of ``TransformerConfig``."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return each argument that cannot be passed on, with the reason and the remedy; see ``TrainerSpec.check_engine``.

    Args:
        arguments: content of ``roles.<role>.engine``.
    """
    problems: dict[str, str] = {}
    for name, value in arguments.items():
        section = SECTIONS.get(name)
        if section is None:
            found = {name: MODEL.problem(name)}
        elif isinstance(value, Mapping):
            found = {f"{name}.{key}": section.problem(key) for key in value}
        else:
            found = {name: f"must be a mapping of fields of {section.of}, but is {value!r}"}
        problems |= {key: problem for key, problem in found.items() if problem is not None}
    return problems


def native(arguments: Mapping[str, Any], section: str | None = None) -> dict[str, Any]:
    """Return what to pass to ``TransformerConfig``, or to the configuration of a section."""
    if section is not None:
        return dict(arguments.get(section, {}))
    return {name: value for name, value in arguments.items() if name not in SECTIONS}


def check_engine_arguments(role: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be passed on.

    Raises:
        ConfigError: names every argument that is unknown, without effect or set by this backend, with the remedy.
    """
    problems = engine_problems(arguments)
    if problems:
        raise ConfigError(
            f"roles.{role}.engine holds arguments that the trainer 'megatron' does not pass to Megatron-Core:\n"
            + "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
            + f"\n  it passes: {', '.join(PASSED)}"
            + "".join(f"; {name}: {', '.join(section.passed)}" for name, section in SECTIONS.items())
        )
