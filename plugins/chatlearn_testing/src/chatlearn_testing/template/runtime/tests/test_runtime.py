from __future__ import annotations

from pathlib import Path

import pytest
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.runtime.plan import RunPlan
from chatlearn_testing.suites import RuntimeConformance

from acme_plugin.options import AcmeOptions
from acme_plugin.runtime import AcmeRuntime
from acme_plugin.store import FileStore


class TestConformance(RuntimeConformance):
    backend = "acme"


def test_the_store_needs_a_directory(tmp_path: Path) -> None:
    plan = RunPlan(discover_plugins(), {}, (), tmp_path, seed=0)
    options = AcmeOptions(store_directory=str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="runtime.options.store_directory: .*missing is no directory"):
        AcmeRuntime(options, plan)


def test_a_value_lives_as_long_as_its_reference(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    reference = store.put({"tokens": [1, 2]})
    assert store.get([reference], 1.0) == [{"tokens": [1, 2]}]
    del reference
    assert not list(tmp_path.iterdir())
