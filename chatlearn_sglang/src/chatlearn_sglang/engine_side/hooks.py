"""Registers all hooks in SGLang, through SGLang's own hook registry, in every process of the engine."""

from __future__ import annotations

from chatlearn_hosting.engine_side.local_groups import keep_local_stores_local

from . import adapter, bucketed_load, memory, seeds


def register() -> None:
    """Register all hooks. Call this before SGLang loads its plugins, which is when it applies them."""
    keep_local_stores_local()
    seeds.register()
    bucketed_load.register()
    adapter.register()
    memory.register()
