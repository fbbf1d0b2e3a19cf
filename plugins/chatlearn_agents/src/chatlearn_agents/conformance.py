"""Settings of ``chatlearn plugins check chatlearn-agents``; runs never import this module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from chatlearn_testing.suites import EnvironmentCase, ToolCase


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


def price(product: str, amount: int = 1) -> float:
    """Look up a price.

    Args:
        product: its name.
        amount: number of pieces.
    """
    prices = {"apple": 0.5, "pear": 0.75}
    if product not in prices:
        raise LookupError(f"no product {product!r}")
    return prices[product] * amount


_HERE = Path(__file__).parent
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
    "tool/function": {
        "options": {"path": "chatlearn_agents.conformance:price"},
        "cases": (
            ToolCase({"product": "apple", "amount": 4}, "2.0"),
            ToolCase({"product": "pear"}, "0.75"),
            ToolCase({"product": "plum"}, None, error="no product 'plum'"),
            ToolCase({"product": "apple", "amount": "many"}, None, error="amount"),
            ToolCase({"amount": 2}, None),
        ),
        "refused_options": ({"path": "chatlearn_agents.conformance:cost"}, {"path": "no_such_module:price"}),
    },
    "tool/calculator": {
        "cases": (
            ToolCase({"expression": "(3 + 4) * 2"}, "14"),
            ToolCase({"expression": "2 ** 0.5"}, "1.41421356237"),
            ToolCase({"expression": "1 / 0"}, None, error="division by zero"),
            ToolCase({"expression": "9 ** 9 ** 9"}, None, error="too large"),
            ToolCase({"expression": "__import__('os')"}, None, error="is not arithmetic"),
            ToolCase({}, None),
        ),
    },
    "tool/python": {
        # Without namespaces the cases run on every machine; the tests of chatlearn-sandbox cover them.
        "options": {"isolation": "none", "timeout_s": 60},
        "cases": (
            ToolCase({"code": "print(6 * 7)"}, "42"),
            ToolCase({"code": "sum(range(5))"}, "10"),
            ToolCase({"code": "pass"}, "[the program printed nothing; print what is to be seen]"),
            ToolCase({}, None),
        ),
    },
    "tool/search": {
        "options": {"path": str(_HERE / "conformance_passages.jsonl"), "results": 1},
        "cases": (
            ToolCase({"query": "Where is the tower of iron?"}, "[1] Paris\nA tower of iron stands there."),
            ToolCase({"query": "canals"}, "[1] Venice\nIts streets are canals."),
            ToolCase({"query": "glaciers"}, "No passage has any of these words."),
            ToolCase({"query": 3}, None),
        ),
        "refused_options": ({"path": str(_HERE / "missing.jsonl")}, {"path": __file__}),
    },
    "tool/mcp": {
        "options": {"command": [sys.executable, str(_HERE / "conformance_server.py")], "start_timeout_s": 120},
        "cases": (
            ToolCase({"a": 1, "b": 2}, "3", "add"),
            ToolCase({"a": -1, "b": 1}, "0", "add"),
            ToolCase({"a": 1}, None, "add"),
            ToolCase({"divisor": 0}, None, "halves", error="nothing is left"),
            ToolCase({"divisor": 4}, "25", "halves"),
        ),
        "refused_options": (
            {"command": ["no-such-program"]},
            {"command": [sys.executable, str(_HERE / "conformance_server.py")], "tools": ["subtract"]},
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
