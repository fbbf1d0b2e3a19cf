"""Settings with which the conformance suite tests this package; a run never imports this module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import RowCase

PROMPT = "Largest planet?\nA. Mars\nB. Jupiter\nAnswer with the letter of the right choice."
PLANETS: dict[str, Any] = {"question": "Largest planet?", "choices": ["Mars", "Jupiter"]}
EXAMPLE = RawExample(prompt=[{"role": "user", "content": PROMPT}], ground_truth="B")

SETTINGS: dict[str, dict[str, Any]] = {
    "dataset/acme": {
        "cases": (
            RowCase({**PLANETS, "answer": 1}, EXAMPLE),
            RowCase({**PLANETS, "answer": "Jupiter", "id": 3}, replace(EXAMPLE, id="3")),
            RowCase({**PLANETS, "answer": "a", "level": "easy"}, replace(EXAMPLE, ground_truth="A")),
            RowCase({**PLANETS, "answer": "Venus"}, None),
            RowCase({**PLANETS, "choices": ["Mars"], "answer": 0}, None),
        ),
    },
}
