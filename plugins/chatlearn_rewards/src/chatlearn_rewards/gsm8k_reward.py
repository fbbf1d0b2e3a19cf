"""Reward ``gsm8k``: the completion's number against the ground truth's, exactly, as decimals."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from decimal import Decimal
from typing import Any

from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.options import Gsm8kOptions
from chatlearn_rewards.pooled_reward import completion_text

MARKER = "####"
NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w.)])[-\u2212]\s?)?          # a minus that is not a subtraction's
    [$\u20ac\u00a3]?\s?
    (?P<sign_after>(?<=[$\u20ac\u00a3])[-\u2212])?
    (?P<digits>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+)
    """,
    re.VERBOSE | re.ASCII,
)


class Gsm8kReward:
    """Pure and fast: it runs where it is called."""

    def __init__(self, options: Gsm8kOptions, context: RoleContext) -> None:
        self._options = options
        self._role = context.role

    def setup(self) -> None:
        """Nothing to start."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """``accuracy`` is 1 or 0; a ground truth without a number is an error that names the prompt."""
        return [self._judge(sample) for sample in samples]

    def health(self) -> str | None:
        return None

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def close(self) -> None:
        """Nothing to release."""

    def _judge(self, sample: Sample) -> RewardResult:
        truth = true_number(sample.prompt.ground_truth)
        if truth is None:
            text = (
                f"reward 'gsm8k' of role {self._role!r}: the ground truth {sample.prompt.ground_truth!r} of prompt "
                f"{sample.prompt.id!r} holds no number; it must be a number or end in '#### NUMBER'"
            )
            return RewardResult(None, error=text)
        right = answered_number(completion_text(sample), strict=self._options.strict) == truth
        return RewardResult(
            self._options.correct if right else self._options.incorrect, {"accuracy": 1.0 if right else 0.0}
        )


def answered_number(text: str, *, strict: bool) -> Decimal | None:
    """The first number on the line after the last ``####``; without one, unless ``strict``, the last number."""
    _, marker, tail = text.rpartition(MARKER)
    if marker:
        found = NUMBER.search(tail.lstrip().split("\n", 1)[0])
        if found:
            return _decimal(found)
    if strict:
        return None
    last = None
    for found in NUMBER.finditer(text):
        last = found
    return _decimal(last) if last else None


def true_number(ground_truth: Any) -> Decimal | None:
    """The number of a ground truth: itself, or in its text the one after ``####``, or the last one."""
    if isinstance(ground_truth, bool):
        return None
    if isinstance(ground_truth, str):
        return answered_number(ground_truth, strict=False)
    try:
        number = Decimal(str(ground_truth))
    except ArithmeticError:
        return None
    return number if number.is_finite() else None


def _decimal(found: re.Match[str]) -> Decimal:
    number = Decimal(found["digits"].replace(",", ""))
    return -number if found["sign"] or found["sign_after"] else number
