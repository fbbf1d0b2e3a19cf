from __future__ import annotations

from chatlearn_cli import plugin
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.sources import DisabledDistributions, PluginSource


def test_every_command_can_be_imported() -> None:
    source = PluginSource("cli", "chatlearn-cli", "0", load=lambda: plugin)
    registry = load_plugins([source], disabled=DisabledDistributions(), strict=True)
    names = [entry.name for entry in registry.entries]
    assert names == ["config", "convert", "eval", "plugins", "plugins list", "plugins show", "run"]
    for command in registry.records("cli_command"):
        registry.load_factory(command, "app")
