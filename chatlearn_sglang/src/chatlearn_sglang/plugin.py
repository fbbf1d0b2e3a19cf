"""Registers the generator ``sglang``. Imports nothing heavy: listing plugins never imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """SGLang, one engine a replica."""
    return [
        GeneratorSpec(
            name="sglang",
            summary="SGLang in a process of its own, usually under another interpreter; tensor parallel; CPU or GPUs.",
            requires=(("sglang>=0.5.23,<0.5.24",),),
            factory="chatlearn_sglang.generator:SGLangGenerator",
            options="chatlearn_sglang.options:SGLangGeneratorOptions",
            check_engine="chatlearn_sglang.engine_arguments:engine_problems",
            channels=frozenset({"tensors", "checkpoint", "memory_handles", "process_group"}),
            payloads=frozenset({"full", "adapter"}),
            pause_modes=frozenset({"keep", "abort", "wait"}),
            bases=frozenset({"processed"}),
            streaming=True,
            resumable=True,
            seeded=True,
            own_interpreter=True,
            device_arguments=(("tp_size",), ("pp_size",)),
        )
    ]
