"""The suite for environments on every one of this distribution."""

from __future__ import annotations

import pytest

from chatlearn_agents import plugin
from chatlearn_agents.conformance import SETTINGS
from chatlearn_testing.check import run_conformance

ENVIRONMENTS = {record.name: record for record in plugin.chatlearn_environments()}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_conforms(name: str) -> None:
    results = run_conformance([ENVIRONMENTS[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
