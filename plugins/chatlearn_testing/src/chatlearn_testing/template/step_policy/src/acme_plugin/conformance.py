"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import StepCase

from acme_plugin.step_policy import USED

TOKENS = "perf/trained_tokens"

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "step_policy/acme": {
        "options": {"tokens": 100},
        "cases": (
            StepCase({TOKENS: 40.0}, adds={USED: 40.0}),
            StepCase(),
            StepCase({TOKENS: 59.0}, adds={USED: 99.0}),
            StepCase({TOKENS: 1.0}, stop="100 of 100 tokens", adds={USED: 100.0}),
            StepCase({TOKENS: 5.0}, stop="105 of 100 tokens", adds={USED: 105.0}),
        ),
        "bad_options": ({}, {"tokens": 0}),
    }
}
