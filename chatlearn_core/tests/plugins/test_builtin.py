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
    names: dict[str, list[str]] = {}
    for entry in registry.entries:
        names.setdefault(str(entry.kind), []).append(entry.name)
    assert not {"cli_command", "runtime"} & names.keys(), "they are plugins' own"
    assert {"logprobs", "entropy", "values", "scores"} <= set(names["output"])
    assert {"generator.generate", "reward.score", "trainer.logprobs"} <= set(names["flow_method"])
    assert names["example_kind"] == ["prompts"]


def test_everything_that_the_core_registers_can_be_imported() -> None:
    source = PluginSource("core", "chatlearn-core", "0", load=lambda: builtin)
    registry = load_plugins([source], disabled=DisabledDistributions(), strict=True)
    for kind in registry.records("example_kind"):
        registry.load_factory(kind)()
    for method in registry.records("flow_method"):
        registry.load_options(method, "arguments")
        assert set(method.outputs) <= registry.outputs.keys()
