"""The suite for launchers on every one of this distribution."""

from __future__ import annotations

import pytest

from chatlearn_ray import plugin
from chatlearn_ray.conformance import SETTINGS
from chatlearn_testing.check import run_conformance

LAUNCHERS = {record.name: record for record in plugin.chatlearn_launchers()}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_conforms(name: str) -> None:
    results = run_conformance([LAUNCHERS[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
