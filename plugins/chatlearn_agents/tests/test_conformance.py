"""The suites for environments and tools on every one of this distribution."""

from __future__ import annotations

import importlib.util

import pytest

from chatlearn_agents import plugin
from chatlearn_agents.conformance import SETTINGS
from chatlearn_core.plugins.records import BackendRecord
from chatlearn_testing.check import run_conformance

RECORDS: dict[str, BackendRecord] = {
    f"{record.kind}/{record.name}": record for record in (*plugin.chatlearn_environments(), *plugin.chatlearn_tools())
}


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.thorough) if key == "tool/mcp" else key for key in RECORDS]
)
def test_conforms(key: str) -> None:
    if key == "tool/mcp" and importlib.util.find_spec("mcp") is None:
        pytest.skip("mcp is not installed")
    results = run_conformance([RECORDS[key]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
