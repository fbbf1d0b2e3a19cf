"""Registers the generator ``sglang``. Imports nothing heavy, so that listing plugins never imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """Register SGLang; each replica is one engine."""
    return [
        GeneratorSpec(
            name="sglang",
            summary="SGLang in its own process, usually under another interpreter; tensor parallel; CPU or GPUs.",
            requires=(("sglang>=0.5.23,<0.5.24",),),
            factory="chatlearn_sglang.generator:SGLangGenerator",
            options="chatlearn_sglang.options:SGLangGeneratorOptions",
            check_engine="chatlearn_sglang.engine_arguments:engine_problems",
            channels=frozenset({"tensors", "checkpoint", "memory_handles", "process_group"}),
            payloads=frozenset({"full", "adapter"}),
            kv_after_sync="recomputed",
            bases=frozenset({"processed"}),
            kept_ids=True,
            streaming=True,
            resumable=True,
            seeded=True,
            own_interpreter=True,
            device_arguments=(("tp_size",), ("pp_size",)),
            layout_arguments=(
                "attn_dp_size",
                "chunked_prefill_size",
                "cpu_offload_gb",
                "disable_cuda_graph",
                "disable_custom_all_reduce",
                "disable_overlap_schedule",
                "disable_radix_cache",
                "dp_size",
                "enable_dp_attention",
                "enable_dynamic_chunking",
                "enable_mixed_chunk",
                "enable_torch_compile",
                "ep_size",
                "max_prefill_tokens",
                "max_queued_requests",
                "max_running_requests",
                "max_total_tokens",
                "mem_fraction_static",
                "num_continuous_decode_steps",
                "page_size",
                "pp_size",
                "prefill_max_requests",
                "radix_eviction_policy",
                "schedule_conservativeness",
                "schedule_policy",
                "tp_size",
                "watchdog_timeout",
            ),
        )
    ]
