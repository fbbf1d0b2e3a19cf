from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from chatlearn_core.types import Prompt
from chatlearn_testing.suites import ExampleKindConformance

from acme_plugin.conformance import SETTINGS
from acme_plugin.example_kind import WeightedDemonstration


class TestConformance(ExampleKindConformance):
    backend = "acme"
    cases = SETTINGS["example_kind/acme"]["cases"]


EXAMPLE = WeightedDemonstration(Prompt("p", np.array([5, 6]), "?"), np.array([7]), np.array([True]), 1.0)


@pytest.mark.parametrize(
    ("field", "value"), [("completion_ids", np.array([8])), ("loss_mask", np.array([False])), ("weight", 2.0)]
)
def test_every_part_is_in_the_content(field: str, value: object) -> None:
    assert list(replace(EXAMPLE, **{field: value}).content()) != list(EXAMPLE.content())
