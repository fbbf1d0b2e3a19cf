"""A group of commands that lists a command from its record, and imports it when it is used."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from chatlearn_core import __version__
from chatlearn_core.plugins.builtin import chatlearn_cli_commands
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import CliCommandSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.select import load_callable
from chatlearn_core.plugins.sources import CORE


class LazyGroup(TyperGroup):
    """The commands below ``chatlearn``.

    Those of the core are known without looking for plugins, so that no plugin can take one away. ``--help`` reads name
    and help of the others from their records.
    """

    # Contexts and commands are click's; Typer has its own copy of click in some versions, so there is no one import
    # for their types.

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._core = {record.name: record for record in chatlearn_cli_commands()}
        self._registry: PluginRegistry | None = None

    @property
    def registry(self) -> PluginRegistry:
        """The installed plugins, found at first use."""
        if self._registry is None:
            self._registry = discover_plugins()
        return self._registry

    def list_commands(self, ctx: Any) -> list[str]:
        """Commands of the core in their own order, then those of plugins by name."""
        others = [record.name for record in self.registry.records("cli_command") if record.name not in self._core]
        return [*self._core, *others]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that knows name and help; ``resolve_command`` gives the command itself."""
        record = self._core.get(cmd_name) or next(
            (record for record in self.registry.records("cli_command") if record.name == cmd_name), None
        )
        return None if record is None else TyperCommand(name=cmd_name, help=record.help or record.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is to run.

        Raises:
            PluginError: no such command, or its plugin cannot be used; names what can.
        """
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name in self._core:
            return name, load_command(self._core[name], f"{CORE} {__version__}"), args[1:]
        record = self.registry.select("cli_command", name, "command line")
        return name, load_command(record, self.registry.origin(record)), args[1:]


def load_command(record: CliCommandSpec, origin: str) -> Any:
    """Import a command: a ``typer.Typer`` is a group even if it holds one command, a function is one command.

    Raises:
        PluginError: the import fails; names plugin, version and cause.
    """
    target = load_callable(record, "app", origin)
    help_text = record.help or record.summary or None
    if isinstance(target, typer.Typer):
        command: Any = get_group(target)
        command.help = command.help or help_text
    else:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name=record.name, help=None if target.__doc__ else help_text)(target)
        command = get_command(single)
    command.name = record.name
    return command
