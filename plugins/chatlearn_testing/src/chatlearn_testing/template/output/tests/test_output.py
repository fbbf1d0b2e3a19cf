from __future__ import annotations

import torch
from chatlearn_testing.suites import FlowMethodConformance, OutputConformance

from acme_plugin.conformance import compute
from acme_plugin.output import margins


class TestConformance(OutputConformance):
    backend = "acme"
    compute = compute


class TestFlowMethod(FlowMethodConformance):
    backend = "trainer.acme_values"


def test_the_margin_is_the_difference_of_two_logits() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0], [0.5, 0.0, 0.5], [9.0, 0.0, 1.0]])
    found = margins(logits, torch.tensor([True, True, False]), temperature=0.5)
    assert found.tolist() == [4.0, 0.0, 0.0]
