"""The suites for schedules, step policies and sample filters on those of this distribution."""

from __future__ import annotations

import pytest

from chatlearn_algorithms import plugin
from chatlearn_algorithms.conformance import SETTINGS
from chatlearn_testing.check import run_conformance

RECORDS = [
    *plugin.chatlearn_schedules(),
    *plugin.chatlearn_step_policies(),
    *plugin.chatlearn_sample_filters(),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_conforms(record: object) -> None:
    results = run_conformance([record], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
