"""Registers the runtime ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import RuntimeSpec


@hookimpl
def chatlearn_runtimes() -> Iterable[RuntimeSpec]:
    """Register the runtime; the record says what a plan may ask of it."""
    return [
        RuntimeSpec(
            name="acme",
            summary="Every worker a process of this machine.",
            factory="acme_plugin.runtime:AcmeRuntime",
            options="acme_plugin.options:AcmeOptions",
            placement="host",
            refreshes=True,
        )
    ]
