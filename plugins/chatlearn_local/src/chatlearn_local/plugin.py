"""Registers the runtime of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RuntimeSpec


@hookimpl
def chatlearn_runtimes() -> Iterable[RuntimeSpec]:
    """``local``."""
    return [
        RuntimeSpec(
            name="local",
            summary="All roles in this process; for laptops, tests and single-device runs.",
            factory="chatlearn_local.runtime:LocalRuntime",
            options="chatlearn_local.options:LocalRuntimeOptions",
            refreshes=True,
        )
    ]
