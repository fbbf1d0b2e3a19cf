"""Registers the tool ``acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import ToolSpec


@hookimpl
def chatlearn_tools() -> Iterable[ToolSpec]:
    """Register the tool."""
    return [
        ToolSpec(
            name="acme",
            summary="Finds lines of a text file.",
            factory="acme_plugin.tool:AcmeTool",
            options="acme_plugin.options:AcmeOptions",
        )
    ]
