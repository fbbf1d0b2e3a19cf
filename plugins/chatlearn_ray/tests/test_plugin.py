from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chatlearn_core.config.load import load_config
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_ray.options import RayRuntimeOptions

from .small_run import write_run


def test_the_runtime_is_registered() -> None:
    registry = discover_plugins()
    record = registry.select("runtime", "ray")
    assert registry.load_options(record) is RayRuntimeOptions
    assert record.requires == (("ray>=2.60",),)


def test_listing_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys, chatlearn_ray.plugin, chatlearn_ray.options, chatlearn_workers.host, chatlearn_workers.rpc, "
        "chatlearn_workers.options;"
        "print([name for name in ('ray', 'torch', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_transport_within_one_process_is_refused_before_anything_starts(tmp_path: Path) -> None:
    registry = discover_plugins()
    ray = ["runtime.backend=ray", "weight_sync.backend=direct"]
    with pytest.raises(ConfigError, match="share a host but not a process"):
        load_config(write_run(tmp_path), ray, registry)


def test_placement_follows_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayRuntimeOptions().placement == "host"
    assert RayRuntimeOptions(address="auto").placement == "anywhere"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert RayRuntimeOptions().placement == "anywhere"
