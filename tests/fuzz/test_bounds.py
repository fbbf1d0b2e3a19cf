"""A case's process reports how it ended, and each case has its own random numbers."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("how", "end", "code", "said"),
    [
        ("returned", "returned", 90, ""),
        ("raised", "raised", 91, "KeyError: 'why'"),
        ("exited", "exited", 3, ""),
        ("killed", "killed", -11, "Segmentation fault"),
        ("timed out", "timed out", -9, "bounds_target.py"),
        ("out of memory", "raised", 91, "MemoryError"),
    ],
)
def test_every_end_is_told(how: str, end: str, code: int, said: str, bounded: Any) -> None:
    outcome = bounded("bounds_target.py:end", how, timeout_s=2.0 if how == "timed out" else 60.0)
    assert (outcome.end, outcome.code) == (end, code), outcome.output
    assert said in outcome.output
    assert outcome.value == ({"text": "\ud800"} if how == "returned" else None)


def test_a_case_draws_the_same_numbers_again(cases: Any) -> None:
    drawn = [(case.number, case.random.random()) for case in cases(quick=3)]
    again = [(number, type(cases.current)(cases.test, number).random.random()) for number, _ in drawn]
    assert again == drawn
    assert len({value for _, value in drawn}) == len(drawn)
