"""Registers the generator ``transformers``. Imports nothing heavy, so that listing plugins never imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import GeneratorSpec


@hookimpl
def chatlearn_generators() -> Iterable[GeneratorSpec]:
    """Register the default generator."""
    return [
        GeneratorSpec(
            name="transformers",
            summary="Continuous batching on a Hugging Face model in this process; CPU or one GPU.",
            factory="chatlearn_transformers.generator:TransformersGenerator",
            options="chatlearn_transformers.options:TransformersGeneratorOptions",
            check_engine="chatlearn_transformers.engine_arguments:engine_problems",
            channels=frozenset({"tensors", "boxes", "checkpoint"}),
            payloads=frozenset({"full"}),
            kv_after_sync="recomputed",
            bases=frozenset({"raw", "processed"}),
            kept_ids=True,
            streaming=True,
            resumable=True,
            scores=True,
            seeded=True,
            layout_arguments=("cache_dir", "local_files_only", "proxies", "token"),
        )
    ]
