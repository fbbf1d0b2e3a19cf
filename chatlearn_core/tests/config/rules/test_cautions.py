"""Settings that are allowed and hardly meant: what is said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.plugins.registry import PluginRegistry


@pytest.mark.parametrize("seeded", [True, False])
def test_a_generator_that_draws_by_no_seed_is_named(seeded: bool, valid: str, registry: PluginRegistry) -> None:
    record = GeneratorSpec(name="acme", seeded=seeded, factory="m:F", options="acme_options_of_config_tests:Empty")
    acme = PluginEntry(name="acme", kind="generator", distribution="acme", version="0.3.0", status="ok", record=record)
    plugins = replace(registry, entries=(*registry.entries, acme))
    warnings = load_config(valid, ["roles.generator.backend=acme"], plugins).warnings
    assert [warning.split(" (seeded")[0].partition(": ")[2] for warning in warnings] == (
        [] if seeded else ["roles.generator.backend: acme does not sample by the seed of a request"]
    )
