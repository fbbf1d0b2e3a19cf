"""Registers the command ``chatlearn acme``. Imports nothing heavy: this module is loaded whenever plugins are listed."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Register the command; ``chatlearn --help`` shows its help without importing it."""
    return [
        CliCommandSpec(
            name="acme",
            app="acme_plugin.command:last_metrics",
            help="Show the last metrics of a run.",
        )
    ]
