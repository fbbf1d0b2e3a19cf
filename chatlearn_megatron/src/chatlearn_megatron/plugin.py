"""Registers the trainer ``megatron``, and where the parameters of models lie in it. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ModelFamilySpec, TrainerSpec


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Register the trainer ``megatron``."""
    return [
        TrainerSpec(
            name="megatron",
            summary="Megatron-Core: tensor, pipeline, context and expert parallelism, distributed optimizer, LoRA",
            factory="chatlearn_megatron.trainer:MegatronTrainer",
            options="chatlearn_megatron.options:MegatronOptions",
            check_engine="chatlearn_megatron.engine_arguments:engine_problems",
            check_model="chatlearn_megatron.layouts:check_model",
            requires=(("megatron-core==0.16.1",), ("torch>=2.13,<2.14",), ("transformers>=5.16.1,<5.20",)),
            heads=frozenset({"lm", "value", "reward"}),
            outputs=frozenset(
                {
                    "logprobs",
                    "entropy",
                    "topk_ids",
                    "topk_logprobs",
                    "logprobs_at",
                    "truncated_logprobs",
                    "values",
                    "scores",
                    "hidden_states",
                }
            ),
            exports=frozenset({"full_tensors", "boxes"}),
            payloads=frozenset({"full", "adapter"}),
            channels=frozenset({"tensors", "boxes"}),
            parallel={
                "tp": "tensor_parallel",
                "pp": "pipeline_parallel",
                "cp": "context_parallel",
                "ep": "expert_parallel",
            },
            reshards=True,
            layout_options=(
                "tensor_parallel",
                "pipeline_parallel",
                "virtual_pipeline",
                "context_parallel",
                "expert_parallel",
                "expert_tensor_parallel",
                "sequence_parallel",
                "overlap",
                "gradient_checkpointing",
                "max_tokens_per_micro_batch",
                "logits_chunk_tokens",
                "transformer_engine",
                "num_threads",
            ),
        )
    ]


@hookimpl
def chatlearn_model_families() -> Iterable[ModelFamilySpec]:
    """Register the layouts of the architectures that Megatron-Core computes; model directories are read as all are."""
    types = {
        "LLAMA": ("llama", "mistral", "qwen2", "qwen3"),
        "QWEN3_MOE": ("qwen3_moe",),
        "DEEPSEEK_V3": ("deepseek_v3",),
        "GPT2": ("gpt2",),
    }
    return [
        ModelFamilySpec(
            name=f"megatron_{name.lower()}",
            summary=f"where the parameters of {', '.join(model_types)} lie in Megatron-Core's layers",
            factory="chatlearn_hf.family:TransformersFamily",
            options="chatlearn_hf.options:TransformersFamilyOptions",
            model_types=frozenset(model_types),
            layouts={"megatron": f"chatlearn_megatron.families:{name}"},
        )
        for name, model_types in types.items()
    ]
