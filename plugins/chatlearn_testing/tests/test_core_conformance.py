"""The suites on what the core registers, with the settings of ``chatlearn plugins check chatlearn-core``."""

from __future__ import annotations

import pytest

from chatlearn_core.plugins import builtin
from chatlearn_testing.check import run_conformance
from chatlearn_testing.core_conformance import SETTINGS

RECORDS = {
    f"{record.kind}/{record.name}": record
    for records in (builtin.chatlearn_example_kinds, builtin.chatlearn_flow_methods, builtin.chatlearn_outputs)
    for record in records()
}


def test_settings_are_of_records() -> None:
    assert SETTINGS.keys() <= RECORDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_conforms(name: str) -> None:
    results = run_conformance([RECORDS[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
