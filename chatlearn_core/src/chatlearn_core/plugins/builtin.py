"""What the core itself registers, through the same hooks as everyone else."""

from __future__ import annotations

from chatlearn_core.plugins import hookimpl
from chatlearn_core.plugins.records import CliCommandSpec, RuntimeSpec


@hookimpl
def chatlearn_runtimes() -> list[RuntimeSpec]:
    """The runtime that needs nothing else."""
    return [
        RuntimeSpec(
            name="local",
            summary="All roles in this process; for laptops, tests and single-device runs.",
            factory="chatlearn_core.runtime.local:LocalRuntime",
            options="chatlearn_core.runtime.options:LocalRuntimeOptions",
        )
    ]


@hookimpl
def chatlearn_cli_commands() -> list[CliCommandSpec]:
    """The commands of the core; plugins cannot take their names."""
    return [
        CliCommandSpec(name="run", app="chatlearn_core.cli.run:run", help="Train a model as a configuration says."),
        CliCommandSpec(name="eval", app="chatlearn_core.cli.run:evaluate", help="Evaluate a model or a checkpoint."),
        CliCommandSpec(
            name="plugins", app="chatlearn_core.cli.plugins:app", help="List, show, write and check plugins."
        ),
        CliCommandSpec(name="config", app="chatlearn_core.cli.config:app", help="Show and check configurations."),
        CliCommandSpec(name="flow", app="chatlearn_core.cli.flow:flow", help="Show an algorithm's data flow."),
    ]
