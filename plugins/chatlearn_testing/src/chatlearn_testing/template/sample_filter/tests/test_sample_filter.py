from __future__ import annotations

from chatlearn_testing.suites import FilterCase, SampleFilterConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.sample_filter import REASON, AcmeFilter


class TestConformance(SampleFilterConformance):
    backend = "acme"
    options = SETTINGS["sample_filter/acme"]["options"]
    cases = SETTINGS["sample_filter/acme"]["cases"]
    bad_options = SETTINGS["sample_filter/acme"]["bad_options"]


def test_earlier_steps_count() -> None:
    sample_filter = AcmeFilter(AcmeOptions(factor=2.0))
    first = [FilterCase("12").sample(f"a#{index}", "a") for index in range(9)]
    assert sample_filter.excluded(first) == {}
    later = FilterCase("123456").sample("b#0", "b")
    assert sample_filter.excluded([later]) == {"b#0": REASON}
