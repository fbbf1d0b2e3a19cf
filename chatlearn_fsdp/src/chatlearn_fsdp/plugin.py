"""Registers the trainer ``fsdp``. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import TrainerSpec


@hookimpl
def chatlearn_trainers() -> Iterable[TrainerSpec]:
    """Register the trainer ``fsdp``."""
    return [
        TrainerSpec(
            name="fsdp",
            summary="PyTorch FSDP2 on Hugging Face models: packed sequences, HSDP, tensor parallelism, Ulysses, ring"
            " attention, LoRA",
            factory="chatlearn_fsdp.trainer:FSDPTrainer",
            options="chatlearn_fsdp.options:FSDPOptions",
            check_engine="chatlearn_fsdp.engine_arguments:engine_problems",
            check_model="chatlearn_fsdp.layouts:check_model",
            requires=(("torch>=2.13,<2.14",), ("transformers>=5.16.1,<5.20",)),
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
            parallel={"tp": "tensor_parallel", "sp": "ulysses", "cp": "ring"},
            reshards=True,
            layout_options=(
                "dp_replicate",
                "dp_shard",
                "zero_stage",
                "ulysses",
                "ring",
                "tensor_parallel",
                "cpu_offload",
                "gradient_checkpointing",
                "max_tokens_per_micro_batch",
                "logits_chunk_tokens",
                "sequences",
                "num_threads",
            ),
        )
    ]
