"""Registers the logger ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import LoggerSpec


@hookimpl
def chatlearn_loggers() -> Iterable[LoggerSpec]:
    """Register the logger."""
    return [
        LoggerSpec(
            name="acme",
            summary="Metrics as StatsD gauges over UDP.",
            factory="acme_plugin.logger:AcmeLogger",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
