from __future__ import annotations

import subprocess
import sys

import pytest
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_ray.options import RayRuntimeOptions


def test_the_runtime_is_registered() -> None:
    registry = discover_plugins()
    record = registry.select("runtime", "ray")
    assert registry.load_options(record) is RayRuntimeOptions
    assert record.requires == (("ray>=2.40",),)


def test_listing_imports_neither_ray_nor_torch() -> None:
    code = (
        "import sys, chatlearn_ray.plugin, chatlearn_ray.options, chatlearn_ray.host;"
        "print([name for name in ('ray', 'torch', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_placement_follows_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayRuntimeOptions().placement == "host"
    assert RayRuntimeOptions(address="auto").placement == "anywhere"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert RayRuntimeOptions().placement == "anywhere"
