from __future__ import annotations

import pytest
from chatlearn_testing.suites import FlowMethodConformance

from acme_plugin.arguments import AcmeArguments
from acme_plugin.conformance import SETTINGS, expected


class TestConformance(FlowMethodConformance):
    backend = "trainer.acme"
    arguments = SETTINGS["flow_method/trainer.acme"]["arguments"]
    expected = expected


class TestAtTheTemperatureOfTheRun(FlowMethodConformance):
    backend = "trainer.acme"


def test_a_temperature_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        AcmeArguments(temperature=0)
