"""The calculator: values from Python's own arithmetic, and expressions that would be code or never end."""

from __future__ import annotations

import math

import pytest

from chatlearn_agents.calculator import calculate
from chatlearn_core.protocols import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) × 3 − 4 ÷ 2", "7"),
        ("2 ** 100", str(2**100)),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("10 / 4", "2.5"),
        ("0.1 + 0.2", "0.3"),
        ("sqrt(2)", f"{math.sqrt(2):.12g}"),
        ("max(1, 2, 3) - abs(-1)", "2"),
        ("cos(pi)", "-1"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 +", "is not an arithmetic expression"),
        ("__import__('os').system('x')", "is not arithmetic"),
        ("(1).bit_length()", "is not arithmetic"),
        ("'a' * 9", "is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("1e308 * 10", "a number is too large"),
        ("(-1) ** 0.5", "not a real number"),
        ("1 / 0", "has no value: division by zero"),
        ("sqrt(-1)", "has no value"),
        ("1,000 + 2", "without thousands separators"),
        ("2 ^ 3", "write ** for powers"),
        ("1" * 501, "at most 500 are read"),
        ("(" * 250 + ")" * 250, ""),
    ],
)
def test_what_has_no_value(expression: str, words: str) -> None:
    with pytest.raises(ToolError) as raised:
        calculate(expression)
    assert words in str(raised.value)
