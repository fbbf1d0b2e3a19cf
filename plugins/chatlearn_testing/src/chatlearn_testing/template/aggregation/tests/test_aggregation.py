from __future__ import annotations

import pytest
import torch
from chatlearn_testing.suites import AggregationCase, AggregationConformance

from acme_plugin.aggregation import power_of_length
from acme_plugin.conformance import MASKS, SETTINGS
from acme_plugin.options import AcmeOptions

EVERY_TOKEN = {"power": 1}


class TestConformance(AggregationConformance):
    backend = "acme"
    cases = SETTINGS["aggregation/acme"]["cases"]


class TestEveryTokenWeighsTheSame(AggregationConformance):
    backend = "acme"
    options = EVERY_TOKEN
    cases = (AggregationCase(MASKS, ((0, 0, 0.2, 0.2, 0.2, 0.2), (0, 0.2), (0, 0, 0))),)


@pytest.mark.parametrize("power", [0, 0.25, 1])
def test_the_weights_add_up_to_one(power: float) -> None:
    batch = AggregationCase(MASKS, MASKS).batch()
    weights = power_of_length(batch, AcmeOptions(power=power))
    assert torch.isclose(weights.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("power", [-0.1, 1.5])
def test_a_power_outside_of_0_to_1_is_refused(power: float) -> None:
    with pytest.raises(ValueError, match="power"):
        AcmeOptions(power=power)
