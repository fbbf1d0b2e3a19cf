from __future__ import annotations

from chatlearn_testing.suites import StepPolicyConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.options import AcmeOptions
from acme_plugin.step_policy import AcmeStepPolicy


class TestConformance(StepPolicyConformance):
    backend = "acme"
    options = SETTINGS["step_policy/acme"]["options"]
    cases = SETTINGS["step_policy/acme"]["cases"]
    bad_options = SETTINGS["step_policy/acme"]["bad_options"]


def test_another_metric_can_be_counted() -> None:
    options = AcmeOptions(tokens=3, metric="samples/trained")
    policy = AcmeStepPolicy(options)
    decisions = [policy.after_step(step, {"samples/trained": 2.0, "perf/trained_tokens": 90.0}) for step in (1, 2)]
    assert [decision.stop for decision in decisions if decision is not None] == [None, "4 of 3 tokens are used"]
