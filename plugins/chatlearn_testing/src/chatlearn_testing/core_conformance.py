"""Settings of ``chatlearn plugins check chatlearn-core``: the core does not import the kit."""

from __future__ import annotations

from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import ExampleKindCase

SETTINGS: dict[str, dict[str, Any]] = {
    "example_kind/prompts": {"cases": (
        ExampleKindCase(RawExample("2+2?", ground_truth="4", columns={"level": "easy"}), ()),
        ExampleKindCase(RawExample([{"role": "user", "content": "2+2?"}], ground_truth="4"), ()),
        ExampleKindCase(RawExample("2+2?"), None),
    )},
}  # fmt: skip
