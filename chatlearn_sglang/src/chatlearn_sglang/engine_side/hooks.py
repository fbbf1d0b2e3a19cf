"""What is changed in SGLang, through its own registry of hooks, in every process of the engine."""

from __future__ import annotations

from chatlearn_hosting.engine_side.local_groups import keep_local_stores_local

from . import adapter, bucketed_load, memory, seeds


def register() -> None:
    """Before SGLang loads its plugins, which is when it applies them."""
    keep_local_stores_local()
    seeds.register()
    bucketed_load.register()
    adapter.register()
    memory.register()
