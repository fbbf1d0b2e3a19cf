"""Finds equations between numbers in a text, and says whether they hold."""

from __future__ import annotations

import re
from fractions import Fraction

_RUN = re.compile(r"[0-9+\-*/×÷·−()=., \t]+")
_TOKEN = re.compile(r"\s*(?:(\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)|([+\-*/×÷·−()]))")
_SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-"}
_LONGEST = 300
"""Characters of an equation that is looked at; a longer one is none."""
_DEEPEST = 20


class _NotArithmeticError(Exception):
    """A side of an equation is no expression."""


def equations_hold(text: str) -> bool | None:
    """Whether every equation in the text holds; None if there is none.

    An equation is a chain of sides (``2 * 3 + 1 = 7``, ``1/2 + 1/2 = 2/2 = 1``) of decimal numbers, + - * / (also × ÷
    ·) and parentheses, at least one with an operator; neighbouring sides must be equal. A side that is a decimal
    fraction is equal if it is the other one rounded to its digits (``10 / 3 = 3.33``). Whatever else has an equals
    sign, such as ``x = 5``, is none.
    """
    found: list[bool] = []
    for run in _RUN.findall(text):
        if "=" not in run or len(run) > _LONGEST:
            continue
        sides = [side.strip(" \t.,") for side in run.split("=")]
        try:
            values = [_value(side) for side in sides]
        except (_NotArithmeticError, ZeroDivisionError):
            continue
        if any(re.search(r"[+\-*/×÷·−]", side.lstrip("-−")) for side in sides):
            pairs = zip(zip(values, sides, strict=True), zip(values[1:], sides[1:], strict=True), strict=False)
            found.append(all(_equal(*left, *right) for left, right in pairs))
    return all(found) if found else None


def _equal(left: Fraction, left_text: str, right: Fraction, right_text: str) -> bool:
    digits = [len(side.partition(".")[2]) for side in (left_text, right_text) if re.fullmatch(r"-?[\d,]*\.\d+", side)]
    return left == right or (bool(digits) and abs(left - right) <= Fraction(1, 2 * 10 ** min(digits)))


def _value(side: str) -> Fraction:
    tokens: list[str] = []
    at = 0
    while at < len(side):
        found = _TOKEN.match(side, at)
        if found is None:
            raise _NotArithmeticError
        tokens.append(found[1].replace(",", "") if found[1] else _SIGNS.get(found[2], found[2]))
        at = found.end()
    value, left = _sum(tokens, 0, 0)
    if left != len(tokens):
        raise _NotArithmeticError
    return value


def _sum(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        other, behind = _product(tokens, at + 1, depth)
        value, at = (value + other if tokens[at] == "+" else value - other), behind
    return value, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _factor(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/":
        other, behind = _factor(tokens, at + 1, depth)
        value, at = (value * other if tokens[at] == "*" else value / other), behind
    return value, at


def _factor(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if at >= len(tokens) or depth > _DEEPEST:
        raise _NotArithmeticError
    if tokens[at] == "-":
        value, behind = _factor(tokens, at + 1, depth + 1)
        return -value, behind
    if tokens[at] == "(":
        value, behind = _sum(tokens, at + 1, depth + 1)
        if behind >= len(tokens) or tokens[behind] != ")":
            raise _NotArithmeticError
        return value, behind + 1
    if not tokens[at][0].isdigit() and tokens[at][0] != ".":
        raise _NotArithmeticError
    return Fraction(tokens[at]), at + 1
