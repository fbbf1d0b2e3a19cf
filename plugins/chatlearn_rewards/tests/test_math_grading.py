from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chatlearn_rewards.ground_truths import math_problem
from chatlearn_rewards.math_grading import answer_key, build_math_grader, is_right
from chatlearn_rewards.options import MathOptions

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
    (r"\fbox{5}", "5"),
    (r"\boxed5", "5"),
    (r"\boxed{1\,234\,567}", "1234567"),
    ("\\boxed{1\u2009234}", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    ("\\boxed{30°}", "30"),
    ("\\boxed{30°}", r"30^\circ"),
    (r"\boxed{0 \le x < 1}", "[0,1)"),
    (r"\boxed{1 > x \geq 0}", "[0,1)"),
    (r"\boxed{x \in [0,1)}", "[0,1)"),
    (r"\boxed{[0,1)}", r"0 \leq x < 1"),
    (r"\boxed{x \le 3}", r"(-\infty,3]"),
    ("\\boxed{(-∞, 3]}", r"(-\infty,3]"),
    ("\\boxed{½}", "0.5"),
    ("\\boxed{3½}", "3.5"),
    ("\\boxed{x²+1}", "x^2+1"),
    ("\\boxed{10⁻³}", "0.001"),
    ("\\boxed{１２}", "12"),
    ("\\boxed{٣}", "3"),
    ("\\boxed{−3}", "-3"),
    ("\\boxed{3×4}", "12"),
    ("\\boxed{√2}", r"\sqrt{2}"),
    ("\\boxed{2π}", r"2\pi"),
    (r"\boxed{3e5}", "300000"),
    (r"\boxed{3e-2}", "0.03"),
    (r"\boxed{\emptyset}", r"\varnothing"),
    ("\\boxed{∅}", r"\emptyset"),
    (r"\boxed{\{\}}", r"\emptyset"),
    (r"\boxed{0.\overline{3}}", r"\frac13"),
    (r"\boxed{0.1\overline{6}}", r"\frac16"),
    (r"\boxed{\textbf{(C)}}", "C"),
    (r"\boxed{C}", r"\text{(C)}"),
    (r"\boxed{\color{red}5}", "5"),
    (r"\boxed{\textcolor{red}{5}}", "5"),
    (r"\boxed{{\color[rgb]{0,0,1} 5}}", "5"),
    (r"\boxed{3 \text{ cm}}", "3"),
    (r"\boxed{3\text{ centimeters}}", r"3 \text{ cm}"),
    (r"\boxed{\pm 3}", "3,-3"),
    (r"\boxed{x=1,x=2}", "1,2"),
    (r"\boxed{1\text{ and }2}", "1,2"),
    (r"6!=\boxed{720}", "720"),
    (r"\boxed{2 + \frac{\pi}{4}}", r"\frac \pi4 + 2"),
    (r"\boxed{\frac\sqrt{3}2 + \frac1\pi}", r"\frac{1}{\pi} + \frac{\sqrt{3}}{2}"),
    (r"\boxed{\sqrt[3]2 + \sqrt\pi + 5^\frac12}", r"\sqrt{5} + \sqrt{\pi} + \sqrt[3]{2}"),
    (r"\boxed{\frac{1}{5} i + \frac{7}{5}}", r"\frac{7}{5} + \frac{1}{5} i."),
]
DIFFERENT = [
    (r"\boxed{7 + \frac \pi4 + 2}", r"\frac \pi4 + 2"),  # the parser sees 2 in the second
    (r"\boxed{\frac{\pi}{7} + 2 - \sqrt2}", r"\frac \pi4 + 2 - \sqrt2"),
    (r"\boxed{\frac{2}{5} + \frac{1}{5} i.}", r"\frac{7}{5} + \frac{1}{5} i."),  # the parser sees 1/5 in both
    (r"\boxed{\frac{2}{5} + \frac{1}{5} i.}", r"\frac{1}{5}"),
    (rf"\boxed{{0.\overline{{{'1' * 5000}}}}}", r"\frac19"),  # more digits than Python makes an integer of
    (rf"\boxed{{{'1' * 5000}.\overline{{3}}}}", "1"),
    (rf"\boxed{{0.{'1' * 5000}\overline{{3}}}}", "1"),
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
    (r"\boxed{1 \quad 2}", "12"),
    (r"\boxed{1$2}", "12"),
    (r"\boxed{" + "1+" * 1000 + "1}", "1001"),
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


@pytest.mark.parametrize("require_boxed", [False, True])
@pytest.mark.parametrize(
    "completion",
    [r"\boxed{" * 10_000, r"\boxed{1}" * 10_000, "<answer>" * 10_000, "{" * 100_000, "1=" * 50_000, "not " * 30_000],
    ids=["open boxes", "boxes", "tags", "braces", "equations", "words"],
)
def test_degenerate_completions_take_no_time(completion, require_boxed):
    """Each has at least 80,000 characters; anything quadratic would run into the limit of the test."""
    assert not is_right(completion, "5", require_boxed=require_boxed)


@pytest.mark.slow
def test_published_ground_truths_equal_themselves_in_other_forms():
    """The 500 answers of MATH's test split and their solutions."""
    folder = os.environ.get("CHATLEARN_TEST_DATA")
    if folder is None:
        pytest.skip("CHATLEARN_TEST_DATA does not name the folder that holds math/test.jsonl")
    rows = [json.loads(line) for line in (Path(folder) / "math/test.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    for row in rows:
        answer = row["answer"]
        assert math_problem(MathOptions(), answer) is None
        assert math_problem(MathOptions(), row["solution"]) is None
        assert is_right(row["solution"], answer), answer
        for form in (
            rf"<answer>{answer}</answer>",
            rf"so \[ \boxed{{ {answer} }} \]",
            rf"\fbox{{\color{{red}}{answer}}}",
        ):
            assert is_right(form, answer), form
            assert not is_right(form.replace("so ", "not "), "-17.25"), form


ONE_VOTE = [
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    (r"\pi/2", r"\frac{\pi}{2}"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("x(x+1)", "x^2+x"),
    (r"\frac{x}{2}", "0.5x"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    ("[0,1)", r"0 \le x < 1"),
    ("x=3", "3"),
    (r"50\%", r"\frac12"),
    ("3+4i", "4i+3"),
    (r"(1,\frac12)", "(1, 0.5)"),
    (r"\text{Evelyn}", r"\text{ Evelyn }"),
]
SEVERAL_VOTES = [
    (r"\sqrt{2}", "1.41"),
    ("(1,2)", "[1,2)"),
    ("(3,1)", "(1,3)"),
    ("x+1", "y+1"),
    ("2^{100}", "2^{101}"),
    ("10^{10^{10}}", "10^{10^{11}}"),
    ("(x+1)^{1000}", "(x+1)^{1001}"),
    ("99999999!", "99999998!"),
]


@pytest.mark.parametrize(("one", "other"), ONE_VOTE)
def test_wrong_answers_that_are_equal_share_a_key(one: str, other: str) -> None:
    """Evaluations group the votes of maj@k by it."""
    grade = build_math_grader(require_boxed=True)
    first, second = (grade((f"\\boxed{{{answer}}}", "77")) for answer in (one, other))
    assert first == second
    assert first["answer"] is not None
    assert not first["right"]


@pytest.mark.parametrize(("one", "other"), SEVERAL_VOTES)
def test_different_answers_have_different_keys(one: str, other: str) -> None:
    """Also those that would take forever to expand."""
    assert answer_key(f"\\boxed{{{one}}}") != answer_key(f"\\boxed{{{other}}}")


def test_answers_that_the_grader_calls_equal_mostly_share_a_key() -> None:
    """The list above is full of notations; what shares no key is compared by spelling."""
    boxed = [(left, right) for left, right in EQUAL if "boxed" in left and "boxed" not in right]
    shared = [answer_key(left) == answer_key(f"\\boxed{{{right}}}") for left, right in boxed]
    assert sum(shared) >= 0.9 * len(shared)
