"""Whole runs in this process on the fakes: a bigram model that samples a token in each turn of the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_testing.fakes.bigram import build_bigram_model
from chatlearn_testing.fakes.records import FAKE_GENERATOR
from chatlearn_testing.whole_runs import WholeRuns, registry_with

GRPO = {
    "name": "grpo",
    "options": {"group_size": 2, "importance_correction": "truncate", "importance_threshold": 5.0},
}


@pytest.fixture(scope="session")
def registry() -> PluginRegistry:
    """Everything installed, and the fakes."""
    unreliable = replace(FAKE_GENERATOR, name="fake_forgetful", resumable=False, kv_after_sync="dropped")
    keeping = replace(FAKE_GENERATOR, name="fake_keeping", resumable=False, kv_after_sync="kept")
    return registry_with(discover_plugins(), unreliable, keeping)


@pytest.fixture(scope="session")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_bigram_model(tmp_path_factory.mktemp("bigram"))


@pytest.fixture
def runs(tmp_path: Path, bigram: Path, registry: PluginRegistry) -> WholeRuns:
    return WholeRuns(tmp_path, bigram, registry, {"algorithm": GRPO})


@pytest.fixture
def completed(runs: WholeRuns) -> Callable[..., Any]:
    """``await completed(name, rollout, *overrides)``: make a run, and return its result."""

    async def complete(name: str, rollout: Mapping[str, Any], *overrides: str) -> dict[str, Any]:
        summary = await runs.make(name, rollout, *overrides).train()
        assert summary["status"] == "completed"
        return runs.result(name)

    return complete
