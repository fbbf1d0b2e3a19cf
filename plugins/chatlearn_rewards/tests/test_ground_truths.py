from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from chatlearn_rewards.ground_truths import gsm8k_problem, math_problem
from chatlearn_rewards.options import Gsm8kOptions, MathOptions


@pytest.mark.parametrize(
    "truth",
    ["5", r"\frac{1}{2}", r"so \boxed{5}", "east", 5, 2.5, np.int64(3), Decimal("0.1"), "[1,2]", r"\{\}", "{5}"],
)
def test_ground_truths_that_can_be_graded(truth):
    assert math_problem(MathOptions(), truth) is None


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        (None, "no ground truth"),
        ("", "empty"),
        ("  ", "empty"),
        ("[]", "empty"),
        (r"\boxed{}", "empty"),
        (r"\frac{", "cut short"),
        (r"\frac{1}{2", "cut short"),
        (r"x = \boxed{1", "cut short"),
        (r"1 + \frac", "cut short"),
        ("1}", "cut short"),
        (float("nan"), "finite"),
        (Decimal("inf"), "finite"),
        (["5"], "a list"),
        (True, "a bool"),
        ({}, "a dict"),
    ],
)
def test_ground_truths_that_cannot_be_graded_are_named(truth, why):
    assert why in math_problem(MathOptions(), truth)


def test_a_number_is_what_gsm8k_needs():
    assert gsm8k_problem(Gsm8kOptions(), "#### 5") is None
    assert "'many', which has no number" in gsm8k_problem(Gsm8kOptions(), "many")
    assert gsm8k_problem(Gsm8kOptions(), "[3, 4, 5]") is not None
