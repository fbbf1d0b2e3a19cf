"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import EnvironmentCase

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "environment/acme": {
        "options": {"max_guesses": 4},
        "cases": (
            EnvironmentCase(("7",), 1.0, ground_truth=7),
            EnvironmentCase(("7 or 3", "9", "It is 7"), 1 / 3, ground_truth=7),
            EnvironmentCase(("none", "9", "8", "6"), 0.0, ground_truth=7),
        ),
    }
}
