from __future__ import annotations

import pytest

from chatlearn_rewards.math_grading import is_right, last_boxed

EQUAL = [
    (r"so \boxed{\frac12}", "0.5"),
    (r"\boxed{1/2}", r"\frac{1}{2}"),
    (r"\boxed{\dfrac{3}{4}}", "0.75"),
    (r"\boxed{(1, 2]}", "(1,2]"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{10\%}", "0.1"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{x=3}", "3"),
    (r"\boxed{\text{east}}", "east"),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{3} \text{ no, } \boxed{4}", "4"),
    ("The final answer is $\\frac{3}{4}$.", r"\dfrac34"),
    ("the answer is 42.", "42"),
    ("first 7, then 8", "8"),
    ("<answer>17</answer>", "17"),
    ("x", "x"),
    (r"\boxed{5}", r"we see that it is \boxed{5}."),
]
DIFFERENT = [
    (r"\boxed{(1,2)}", "(1,2]"),
    (r"\boxed{\text{west}}", "east"),
    (r"\boxed{3 1/2}", "31/2"),
    (r"\boxed{0.333}", r"\frac13"),
    (r"\boxed{4} or rather \boxed{3}", "4"),
    (r"\boxed{\{1,2,3\}}", r"\{1,2\}"),
    ("first 7, then 8", "7"),
    ("-3", "3"),
    (r"\boxed{5", "5"),
    (r"\boxed{}", "5"),
    ("no number here", "5"),
    ("", "5"),
]


@pytest.mark.parametrize(("completion", "truth"), EQUAL)
def test_equal_answers(completion, truth):
    assert is_right(completion, truth)


@pytest.mark.parametrize(("completion", "truth"), DIFFERENT)
def test_different_answers(completion, truth):
    assert not is_right(completion, truth)


def test_only_boxed_answers_count_where_that_is_required():
    assert not is_right("the answer is 42", "42", require_boxed=True)
    assert not is_right("<answer>42</answer>", "42", require_boxed=True)
    assert is_right(r"\boxed{42}", "42", require_boxed=True)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"\boxed{\frac{1}{2}} then \boxed{a_{1}}", "a_{1}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{1} and cut short \boxed{2", "1"),
        (r"\fbox{no} \boxed {7}", "7"),
        ("nothing", None),
    ],
)
def test_last_boxed_matches_braces(text, held):
    assert last_boxed(text) == held
