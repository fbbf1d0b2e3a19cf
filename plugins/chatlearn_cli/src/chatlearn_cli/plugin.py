"""Registers the commands of this distribution."""

from __future__ import annotations

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec


@hookimpl
def chatlearn_cli_commands() -> list[CliCommandSpec]:
    """The built-in commands; other plugins cannot take their names."""
    return [
        CliCommandSpec(name="run", app="chatlearn_cli.run:run", help="Train a model according to a configuration."),
        CliCommandSpec(name="eval", app="chatlearn_cli.evaluate:evaluate", help="Evaluate models or checkpoints."),
        CliCommandSpec(
            name="convert", app="chatlearn_cli.convert:convert", help="Convert a checkpoint for other trainers."
        ),
        CliCommandSpec(name="plugins", app="chatlearn_cli.plugins:app", help="List and show plugins."),
        CliCommandSpec(
            name="plugins list", app="chatlearn_cli.plugins:list_plugins", help="List every installed plugin."
        ),
        CliCommandSpec(name="plugins show", app="chatlearn_cli.plugins:show", help="Show what a plugin declares."),
        CliCommandSpec(name="config", app="chatlearn_cli.config:app", help="Show and check configurations."),
    ]
