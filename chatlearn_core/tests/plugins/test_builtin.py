from __future__ import annotations

from chatlearn_core.plugins import builtin
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.sources import DisabledDistributions, PluginSource, installed_sources


def test_the_core_registers_through_the_hooks_like_everyone() -> None:
    (source,) = [source for source in installed_sources() if source.distribution == "chatlearn-core"]
    assert source.load() is builtin


def test_what_the_core_registers() -> None:
    source = PluginSource("core", "chatlearn-core", "0", load=lambda: builtin)
    registry = load_plugins([source], disabled=DisabledDistributions(), strict=True)
    assert [entry.name for entry in registry.entries] == ["config", "eval", "flow", "plugins", "run", "local"]


def test_everything_that_the_core_registers_can_be_imported() -> None:
    source = PluginSource("core", "chatlearn-core", "0", load=lambda: builtin)
    registry = load_plugins([source], disabled=DisabledDistributions(), strict=True)
    for command in registry.records("cli_command"):
        registry.load_factory(command, "app")
    for runtime in registry.records("runtime"):
        registry.load_factory(runtime)
        registry.load_options(runtime)
