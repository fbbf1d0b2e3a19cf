"""Settings of ``chatlearn plugins check chatlearn-agents``; runs never import this module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from chatlearn_testing.suites import EnvironmentCase


@cache
def chat_tokenizer() -> Any:
    """A small tokenizer whose chat template has tools."""
    from chatlearn_hf.tiny import TOOLS_TEMPLATE, build_tiny_tokenizer  # imports transformers

    tokenizer: Any = build_tiny_tokenizer()
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


class Countdown:
    """A game: whoever brings the number to exactly 0 wins."""

    def __init__(self) -> None:
        self.left = 3

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin, in the manner of Gymnasium."""
        return f"{self.left} left", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Subtract a number from 1 to 3."""
        self.left -= max(1, min(3, int(action) if action.isdigit() else 1))
        over = self.left <= 0
        return f"{max(self.left, 0)} left", float(self.left == 0) if over else 0.0, over, False, {}

    def close(self) -> None:
        """Nothing to release."""


_CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
_CHAT = "chatlearn_agents.conformance:chat_tokenizer"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "environment/correction": {
        "tokenizer": _CHAT,
        "options": {"max_attempts": 2},
        "cases": (
            EnvironmentCase(("It is 2.",), 1.0, ground_truth="2"),
            EnvironmentCase(("3", "It is 2"), 0.8, ground_truth="2"),
            EnvironmentCase(("3", "4"), 0.0, ground_truth="2"),
        ),
    },
    "environment/tools": {
        "tokenizer": _CHAT,
        "options": {"tools": ["calculator"]},
        "cases": (
            EnvironmentCase(("It is 2.",)),
            EnvironmentCase((_CALL, "It is 2.")),
            EnvironmentCase((_CALL.replace("calculator", "oracle"), _CALL, "It is 2.")),
        ),
    },
    "environment/game": {
        "tokenizer": _CHAT,
        "options": {"make": "chatlearn_agents.conformance:Countdown", "action": "text"},
        "cases": (
            EnvironmentCase(("3",), 1.0),
            EnvironmentCase(("1", "2"), 1.0),
            EnvironmentCase(("2", "3"), 0.0),
        ),
    },
}
"""``kind/name`` -> attributes of the suite."""
