"""A command group that lists commands from their records, and imports a command when it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from chatlearn_cli import __version__
from chatlearn_cli.plugin import chatlearn_cli_commands
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import CliCommandSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.plugins.select import load_callable
from chatlearn_core.plugins.sources import COMMAND_LINE


class LazyGroup(TyperGroup):
    """The commands below ``chatlearn``, or below the command that ``path`` names.

    This distribution's own commands need no discovery of plugins, so no plugin can replace them.
    ``--help`` shows the names and help texts in the records of the others.
    """

    # Contexts and commands are click's; Typer has its own copy of click in some versions, so there is no one import
    # for their types.

    path = ""
    """Prefix of the names in the records of this group's commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._own = self._below(chatlearn_cli_commands())
        self._registry: PluginRegistry | None = None

    @property
    def registry(self) -> PluginRegistry:
        """The installed plugins, discovered on first use."""
        if self._registry is None:
            self._registry = discover_plugins()
        return self._registry

    def _below(self, records: Iterable[CliCommandSpec]) -> dict[str, CliCommandSpec]:
        """Records of the commands directly below this group, by the word to type."""
        words = {record.name.removeprefix(self.path): record for record in records if record.name.startswith(self.path)}
        return {word: record for word, record in words.items() if " " not in word}

    def list_commands(self, ctx: Any) -> list[str]:
        """This distribution's commands in declaration order, then plugins' commands by name."""
        return list(self._own | self._below(self.registry.records("cli_command")))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with name and help; ``resolve_command`` returns the command itself."""
        record = self._own.get(cmd_name) or self._below(self.registry.records("cli_command")).get(cmd_name)
        return None if record is None else TyperCommand(name=cmd_name, help=record.help or record.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command to run.

        Raises:
            PluginError: there is no such command, or its plugin cannot be used; lists usable commands.
        """
        name = args[0]
        if ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name in self._own:
            return name, load_command(self._own[name], f"{COMMAND_LINE} {__version__}"), args[1:]
        record = self.registry.select("cli_command", self.path + name, "command line")
        return name, load_command(record, self.registry.origin(record)), args[1:]


class PluginsGroup(LazyGroup):
    """The commands below ``chatlearn plugins``."""

    path = "plugins "


def load_command(record: CliCommandSpec, origin: str) -> Any:
    """Import a command: a ``typer.Typer`` is a group even if it holds one command; a function is one command.

    Raises:
        PluginError: the import fails; names plugin, version and cause.
    """
    target = load_callable(record, "app", origin)
    help_text = record.help or record.summary or None
    word = record.name.rpartition(" ")[2]
    if isinstance(target, typer.Typer):
        command: Any = get_group(target)
        command.help = command.help or help_text
    else:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name=word, help=None if target.__doc__ else help_text)(target)
        command = get_command(single)
    command.name = word
    return command
