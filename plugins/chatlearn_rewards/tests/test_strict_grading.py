from __future__ import annotations

import pytest

from chatlearn_rewards.math_grading import is_right

GAMED = [
    ("answer: 1, 2, 3, 4", "1"),
    ("It could be 1, 2 or 3", "3"),
    ("3, 4", "4"),
    ("The answer is not 3", "3"),
    ("It isn't 3.", "3"),
    (r"the answer is not \boxed{3}", "3"),
    (r"\boxed{x=3=4}", "4"),
    (r"\boxed{1=2=3=4=5}", "5"),
    ("so 1=2=3=4=5", "5"),
    (r"\boxed{3 \text{ cm}}", r"3 \text{ m}"),
    (r"\boxed{3 cm}", "3 m"),
    (r"\boxed{3 \text{ cm}}", r"3 \text{ cm}^2"),
    (r"\boxed{3 \text{ square feet}}", r"3 \text{ feet}"),
    (r"\boxed{18 \text{ cents}}", r"\$18"),
    (r"\boxed{\{1,1,2\}}", "1,2"),
    (r"\boxed{1,1,2}", "1,2"),
    (r"\boxed{\{1,2\}}", "(1,2)"),
    (r"\boxed{1/2006!}", "1/2004!"),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}"),
    (r"\boxed{1 2}", "3"),
    ("It is false that the answer is 3", "3"),
    ("It is anything but 3", "3"),
    ("It is less than 3", "3"),
    ("3 is not the answer", "3"),
    (r"\boxed{3\text{ m/s}}", r"3\text{ km/h}"),
    (r"\boxed{3\mathrm{N}}", r"3\mathrm{J}"),
    (r"\boxed{3\text{ euros}}", r"\$3"),
    (r"\boxed{3^\circ}", r"3\text{ rad}"),
    (r"\boxed{3\text{ apples}}", r"3\text{ oranges}"),
    (r"\boxed{101_2}", "101_3"),
]
"""What math-verify calls equal and no teacher would."""


@pytest.mark.parametrize(("completion", "truth"), GAMED)
def test_what_games_the_grader_is_refused(completion, truth):
    assert is_right(completion, truth, strict=False), "the case shows nothing: it is wrong anyway"
    assert not is_right(completion, truth)


@pytest.mark.parametrize(
    ("completion", "truth"),
    [
        ("It is not 4, but 3", "3"),
        ("The probability that they do not meet is 1/2.", "1/2"),
        ("The number of students who did not pass is 12.", "12"),
        ("The answer is 3, which is not 4.", "3"),
        ("Thus 12 students didn't pass.", "12"),
        (r"\boxed{18\text{ different ways}}", r"18\text{ ways.}"),
        (r"\boxed{3\text{ apple}}", r"3\text{ apples}"),
        (r"\boxed{30^\circ}", r"30\text{ degrees}"),
        (r"\boxed{101_2}", "101_{2}"),
        ("There are 3 apples, 4 pears and 7 in total", "7"),
        ("first 7, then 8", "8"),
        ("So 2*3 = 6", "6"),
        (r"\boxed{2+2=4}", "4"),
        (r"\boxed{\text{neither}}", r"\text{neither}"),
        (r"The answer is $\text{neither}$.", r"\text{neither}"),
        (r"\boxed{x \neq 3}", r"x \neq 3"),
        (r"\boxed{300 \text{ cm}}", "300"),
        (r"\boxed{3 \text{ centimetres}}", r"3 \text{ cm}"),
        (r"\boxed{3 \text{ sq. cm}}", r"3 \text{ cm}^2"),
        (r"\boxed{3 1/2}", "3.5"),
        (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)"),
        (r"\boxed{0.333333}", r"\frac13"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{1.0\times 10^{-30}}", "10^{-30}"),
    ],
)
def test_honest_answers_are_as_right_as_before(completion, truth):
    if is_right(completion, truth, strict=False):
        assert is_right(completion, truth)
    else:
        pytest.fail("lenient grading refuses it: the case shows nothing")


@pytest.mark.parametrize(
    "completion", ["answer: 1, 2", r"\boxed{\{1,2\}}", r"not \boxed{3}", r"\boxed{7}", "12", r"\boxed{3 \text{ m}}"]
)
@pytest.mark.parametrize("truth", ["1", "3", "7", "12", "1,2", "3 cm", r"\frac12"])
def test_strict_loosens_nothing(completion, truth):
    assert is_right(completion, truth, strict=False) or not is_right(completion, truth)
