"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_testing.suites import RewardCase

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "reward/acme": {
        "options": {"length_budget": 20, "length_penalty": 0.125},
        "cases": (
            RewardCase("red and Blue", 1.0, ground_truth=["red", "blue"]),
            RewardCase("red", 0.5, ground_truth=["red", "blue"], components={"coverage": 0.5, "length_penalty": 0.0}),
            RewardCase("green", 0.0, ground_truth="blue"),
            RewardCase("Größe", 1.0, ground_truth="größe"),
            RewardCase(
                "red, blue and two more",
                1.0 - 2 * 0.125,
                ground_truth=["red", "blue"],
                components={"coverage": 1.0, "length_penalty": -0.25},
            ),
            RewardCase("red", None, ground_truth=7),
        ),
    }
}
