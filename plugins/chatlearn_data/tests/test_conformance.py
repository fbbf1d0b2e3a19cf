"""The suites for dataset formats, readers and samplers on every one of this distribution."""

from __future__ import annotations

import pytest

from chatlearn_data import plugin
from chatlearn_data.conformance import SETTINGS
from chatlearn_testing.check import run_conformance
from chatlearn_testing.suites import SamplerConformance

DATASETS = {record.name: record for record in plugin.chatlearn_datasets()}


@pytest.mark.parametrize("name", DATASETS)
def test_conforms(name: str) -> None:
    results = run_conformance([DATASETS[name]], settings=SETTINGS)
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))


class TestShuffled(SamplerConformance):
    backend = "shuffled"
