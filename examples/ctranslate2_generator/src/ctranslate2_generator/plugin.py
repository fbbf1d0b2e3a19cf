"""Registers the generator ``ctranslate2``. Imports no engine: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """What the adapter does with CTranslate2 4.8. The engine draws from random numbers of its own: not ``seeded``."""
    return [
        GeneratorSpec(
            name="ctranslate2",
            summary="CTranslate2 in this process: several requests at a time, one worker each.",
            factory="ctranslate2_generator.generator:CTranslate2Generator",
            options="ctranslate2_generator.options:CTranslate2Options",
            check_engine="ctranslate2_generator.options:engine_problems",
            requires=(("ctranslate2>=4.8,<4.9",),),
            channels=frozenset({"tensors", "checkpoint"}),
            kv_after_sync="recomputed",
            streaming=True,
            resumable=True,
            model_families=frozenset({"llama", "mistral", "qwen2", "qwen3"}),
        )
    ]
