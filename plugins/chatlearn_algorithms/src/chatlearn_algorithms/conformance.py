"""Settings of ``chatlearn plugins check chatlearn-algorithms``; no run imports them."""

from __future__ import annotations

from typing import Any

from chatlearn_testing.suites import FilterCase, StepCase

SETTINGS: dict[str, dict[str, Any]] = {
    # Their losses hold a factor whose gradient is stopped, so finite differences are not their gradients.
    "algorithm/cispo": {"detaches": True},
    "algorithm/gspo": {"detaches": True},
    "algorithm/gdpo": {
        "options": {"rewards": {"correct": 1, "short": 0.5}},
        "reward_components": ("correct", "short"),
    },
    "schedule/linear": {
        "options": {"start": 2.0, "end": -1.0, "first_step": 5, "last_step": 11},
        "values": {1: 2.0, 5: 2.0, 6: 1.5, 8: 0.5, 11: -1.0, 12: -1.0, 500: -1.0},
        "bounds": (-1.0, 2.0),
        "bad_options": (
            {"start": 1.0, "end": 0.0, "first_step": 5, "last_step": 5},
            {"start": 1.0, "end": 0.0, "first_step": 0, "last_step": 5},
            {"start": 1.0, "end": 0.0},
        ),
    },
    "step_policy/early_stop": {
        "options": {"metric": "eval/accuracy", "patience": 2, "min_improvement": 0.125, "goal": 0.875},
        "cases": (
            StepCase({"eval/accuracy": 0.25}),
            StepCase(),
            StepCase({"eval/accuracy": 0.5}),
            StepCase({"eval/accuracy": 0.5625}),
            StepCase(),
            StepCase({"eval/accuracy": 0.25}, stop="has not improved on 0.5 in its last 2 measurements"),
            StepCase({"eval/accuracy": 0.75}),
            StepCase({"eval/accuracy": 0.875}, stop="its goal 0.875"),
        ),
        "bad_options": ({"mode": "best"}, {"patience": 0}, {"min_improvement": -1.0}),
    },
    "sample_filter/truncated": {
        "cases": (FilterCase("the end"), FilterCase("cut o", finish_reason="length", excluded="truncated")),
    },
}
