"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import ExampleKindCase

CHAT = [{"role": "user", "content": "2+2?"}]
DIALOGUE = [
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]

SETTINGS: dict[str, dict[str, Any]] = {
    "example_kind/acme": {
        "cases": (
            ExampleKindCase(RawExample("2+2?", completion="4", ground_truth="4"), ("4",), ({"weight": 1.0},)),
            ExampleKindCase(
                RawExample("2+2?", completion="4", columns={"weight": 2.5, "level": "easy"}),
                ("4",),
                ({"weight": 2.5},),
            ),
            ExampleKindCase(
                RawExample(CHAT, completion=DIALOGUE, columns={"weight": 3}), ("4Yes",), ({"weight": 3.0},)
            ),
            ExampleKindCase(RawExample("2+2?"), None),
            ExampleKindCase(RawExample("2+2?", completion="4", columns={"weight": "much"}), None),
            ExampleKindCase(RawExample("2+2?", completion="4", columns={"weight": 0}), None),
        ),
    },
}
