"""Reward ``gsm8k``: compares the completion's number with the ground truth's, exactly, as fractions."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.inline_reward import InlineReward
from chatlearn_rewards.options import Gsm8kOptions

MARKER = "####"
NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w.)])[-\u2212]\s?)?          # a minus that is not a subtraction's
    [$\u20ac\u00a3]?\s?
    (?P<sign_after>(?<=[$\u20ac\u00a3])[-\u2212])?
    (?:(?P<whole>(?<![\d.,/])\d{1,9})\s+(?=\d{1,9}\s?/\s?\d))?     # of a mixed number: 3 1/2
    (?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)
    (?:[eE](?P<exponent>[-+]?\d{1,3})(?![\w.]))?
    (?:\s?/\s?(?P<denominator>\d+(?:\.\d+)?))?
    """,
    re.VERBOSE | re.ASCII,
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
SPACED_THOUSANDS = re.compile(r"(?<=\d)[ \u00a0\u2009\u202f](?=\d{3}(?!\d))")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", re.ASCII)
NOT_ONE = re.compile(
    r"^\W*\bnot\b|^[^\w#]*[-\u2212]?[\d.,]+(?:\s*(?:\||=|\^|\*\*?|\u00d7|\u00b7)\s*[-\u2212]?[\d.]|\s+\d+(?![\d.,]*\s?/))",
    re.ASCII | re.IGNORECASE,
)
"""After the marker: a negation, a number that continues as an expression, or a second number beside the first."""
SEVERAL = re.compile(r"[-\u2212]?[\d.,/]*\d\s*(?:,|;|\bor\b|\band\b)\s*[-\u2212]?\.?\d[\d.,/]*[\s\])}.!]*$", re.ASCII)
"""At the end of a text: several values in a row, which are guesses, not an answer."""
TAIL_CHARACTERS = 2000
"""Number of characters at the end of a completion without ``####`` in which the last number is searched."""
MAX_DIGITS = 100
"""A longer run of digits is not an answer, and computing with it would be slow."""


class Gsm8kReward(InlineReward):
    """``accuracy`` is 1 or 0; a ground truth without a number is an error that names the prompt."""

    def __init__(self, options: Gsm8kOptions, context: RoleContext) -> None:
        self._options = options
        self._role = context.role

    def judge(self, sample: Sample) -> RewardResult:
        truth = true_number(sample.prompt.ground_truth)
        if truth is None:
            text = (
                f"reward 'gsm8k' of role {self._role!r}: the ground truth {sample.prompt.ground_truth!r} of prompt "
                f"{sample.prompt.id!r} has no number; it must be a number or end in '#### NUMBER'"
            )
            return RewardResult(None, error=text)
        answer = answered_number(sample.text, strict=self._options.strict)
        right = answer == truth
        return RewardResult(
            self._options.correct if right else self._options.incorrect,
            {"accuracy": 1.0 if right else 0.0},
            answer=None if answer is None else str(answer),
        )


def answered_number(text: str, *, strict: bool) -> Fraction | None:
    """The first number on the line after the last ``####``; without one, unless ``strict``, the last number.

    Fractions (``3/4``, ``\\frac{3}{4}``), mixed numbers (``3 1/2``) and powers of ten (``3e5``) are read as such.
    Several values in a row (``3, 4, 5``) are not an answer.
    """
    _, marker, tail = text.rpartition(MARKER)
    if marker:
        line = LATEX_FRACTION.sub(r"\1/\2", tail.lstrip().split("\n", 1)[0][:TAIL_CHARACTERS])
        found = NUMBER.search(line)
        if found:
            line = SPACED_THOUSANDS.sub("", line)
            return None if _is_list(line) or NOT_ONE.search(line) else _fraction(NUMBER.search(line) or found)
    if strict:
        return None
    end = LATEX_FRACTION.sub(r"\1/\2", text[-TAIL_CHARACTERS:])
    if _is_list(end):
        return None
    last = None
    for found in NUMBER.finditer(end):
        last = found
    return _fraction(last) if last else None


def true_number(ground_truth: Any) -> Fraction | None:
    """Return the number of a ground truth: a number itself; of a text, the number after ``####``, or the last one."""
    if isinstance(ground_truth, bool):
        return None
    if isinstance(ground_truth, str):
        return answered_number(ground_truth, strict=False)
    try:
        number = Decimal(str(ground_truth))
    except ArithmeticError:
        return None
    return Fraction(number) if number.is_finite() and abs(number.adjusted()) <= MAX_DIGITS else None


def _is_list(text: str) -> bool:
    """Whether a text ends in several values; commas in thousands do not separate values."""
    return bool(SEVERAL.search(THOUSANDS.sub("", text)))


def _fraction(found: re.Match[str]) -> Fraction | None:
    if len(found["digits"]) > MAX_DIGITS or len(found["denominator"] or "") > MAX_DIGITS:
        return None
    number = Fraction(found["digits"].replace(",", ""))
    exponent = int(found["exponent"] or 0)
    number *= Fraction(10) ** exponent
    if found["denominator"]:
        denominator = Fraction(found["denominator"])
        if denominator == 0:
            return None
        number /= denominator
    number += int(found["whole"] or 0)
    return -number if found["sign"] or found["sign_after"] else number
