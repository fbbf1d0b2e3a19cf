"""Registers the trainer ``deepspeed``. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import TrainerSpec


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Register the trainer ``deepspeed``."""
    return [
        TrainerSpec(
            name="deepspeed",
            summary="DeepSpeed ZeRO 1, 2 and 3 on Hugging Face models: packing, offload, Ulysses, ring attention, LoRA",
            factory="chatlearn_deepspeed.trainer:DeepSpeedTrainer",
            options="chatlearn_deepspeed.options:DeepSpeedOptions",
            check_engine="chatlearn_deepspeed.engine_arguments:engine_problems",
            check_model="chatlearn_trainer_kit.ulysses_sizes:check_model",
            requires=(("deepspeed==0.19.8",), ("torch>=2.13,<2.14",), ("transformers>=5.16.1,<5.20",)),
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
            parallel={"sp": "ulysses", "cp": "ring"},
            reshards=True,
            layout_options=(
                "zero_stage",
                "ulysses",
                "ring",
                "offload_optimizer",
                "offload_params",
                "export_bucket_mib",
                "gradient_checkpointing",
                "max_tokens_per_micro_batch",
                "logits_chunk_tokens",
                "sequences",
                "num_threads",
            ),
        )
    ]
