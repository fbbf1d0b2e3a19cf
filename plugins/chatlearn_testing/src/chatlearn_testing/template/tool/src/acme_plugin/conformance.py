"""Input of the conformance suite; ``chatlearn plugins check`` and the tests read it, a run never does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_testing.suites import ToolCase

_SAMPLE = Path(__file__).with_name("sample.txt")
_FOX = "1: The quick brown fox jumps over the lazy dog."
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "tool/acme": {
        "options": {"path": str(_SAMPLE), "max_lines": 2},
        "cases": (
            ToolCase({"word": "fox"}, _FOX),
            ToolCase({"word": "LAZY"}, f"{_FOX}\n2: A lazy afternoon is long."),
            ToolCase({"word": "o"}, f"{_FOX}\n2: A lazy afternoon is long."),
            ToolCase({"word": "the", "skip": 1}, "3: The dog sleeps."),
            ToolCase({"word": "cat"}, None, error="0 lines contain 'cat'"),
            ToolCase({"word": "fox", "skip": 1}, None, error="1 lines contain 'fox'"),
            ToolCase({"word": "fox", "skip": "one"}, None),
            ToolCase({"word": "fox", "limit": 1}, None),
        ),
        "refused_options": ({"path": str(_SAMPLE.with_name("missing.txt"))},),
    }
}
