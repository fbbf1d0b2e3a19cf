"""A transport that this repository does not know, the package template's, works with every engine as it is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from matrix_stand import FSDP_1, GENERATORS, LOCAL, Bench, Stand

from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.records import WeightSyncSpec
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPLATE = Path(__file__).parents[2] / "plugins" / "template" / "weight_sync" / "src"


@pytest.fixture
def transport() -> Iterator[WeightSyncSpec]:
    """What the template's plugin module registers, imported as if it were installed."""
    sys.path.insert(0, str(TEMPLATE))
    try:
        [record] = importlib.import_module("acme_plugin.plugin").chatlearn_weight_syncs()
        yield record
    finally:
        sys.path.remove(str(TEMPLATE))
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_plugin"]:
            del sys.modules[name]


def registry_with(transport: WeightSyncSpec) -> PluginRegistry:
    """The installed plugins and this one."""
    registry = discover_plugins()
    entry = PluginEntry(
        name=transport.name, kind="weight_sync", distribution="acme", version="1.0", status="ok", record=transport
    )
    return replace(registry, entries=(*registry.entries, entry))


@pytest.mark.parametrize(
    "generator", [pytest.param(name, marks=[pytest.mark.matrix] * (name == "sglang")) for name in GENERATORS]
)
def test_the_templates_transport_needs_nothing_of_an_engine(
    generator: str, transport: WeightSyncSpec, tmp_path: Path
) -> None:
    model = build_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    with Stand(
        registry_with(transport), Bench("local", generator, 1, tied=True, trainers=LOCAL), model, tmp_path
    ) as stand:
        stand.check(FSDP_1, transport)
