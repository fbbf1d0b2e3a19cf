"""Equations in a step's text."""

from __future__ import annotations

import time

import pytest

from chatlearn_rewards.arithmetic import equations_hold


@pytest.mark.parametrize(
    "text",
    [
        "So 2 * 3 + 1 = 7.",
        "She sold 48/2 = <<48/2=24>>24 clips.",
        "1/2 + 1/2 = 2/2 = 1",
        "(1 + 2) × 3 = 9, and 10 ÷ 4 = 2.5",
        "1,200 + 300 = 1,500",
        "-3 + 5 = 2",
        "5 − 8 = −3",
        "10 / 3 = 3.33",
        "7 = 3 + 4",
    ],
)
def test_what_holds(text: str) -> None:
    assert equations_hold(text) is True


@pytest.mark.parametrize(
    "text",
    ["2 + 2 = 5", "10 / 3 = 3.34", "10 / 3 = 3", "1 + 1 = 2 = 3", "2 * 3 = 6, so 6 + 1 = 8", "0.1 + 0.2 = 0.4"],
)
def test_what_does_not(text: str) -> None:
    assert equations_hold(text) is False


@pytest.mark.parametrize(
    "text",
    ["", "x = 5", "2x + 1 = 7", "5 = 5", "1 / 0 = 7", "3 + = 4", "2 ** 3 = 8", "a + b = c", "(1 + 2 = 3", "1 + 2 ="],
)
def test_what_is_no_equation(text: str) -> None:
    assert equations_hold(text) is None


def test_hostile_text_is_quick() -> None:
    begun = time.process_time()
    for text in (
        "(" * 5000 + "=1",
        "1+" * 5000 + "1=2",
        "-" * 290 + "1=1",
        "9*" * 140 + "9=1",
        "=" * 5000,
        "1 " * 9999,
    ):
        assert equations_hold(text) in (None, False)
    assert time.process_time() - begun < 1.0
