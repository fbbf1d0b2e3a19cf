"""Registers the commands ``chatlearn plugins new`` and ``chatlearn plugins check``."""

from __future__ import annotations

from collections.abc import Iterable

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec


@hookimpl
def chatlearn_cli_commands() -> Iterable[CliCommandSpec]:
    """Return both commands, which join the group ``plugins`` of the command line."""
    return [
        CliCommandSpec(
            name="plugins new",
            app="chatlearn_testing.cli.plugins_new:new",
            help="Create a working plugin package with tests, as a starting point.",
        ),
        CliCommandSpec(
            name="plugins check",
            app="chatlearn_testing.cli.plugins_check:check",
            help="Run the conformance suites on every plugin of a distribution.",
        ),
    ]
