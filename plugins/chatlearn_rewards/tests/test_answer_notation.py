from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_rewards.answer_notation import in_plain_latex, in_plain_prose, interval


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"10,\!000", "10000"),
        (r"1\,234.5", "1234.5"),
        (r"1\,2", r"1\,2"),
        ("x₁²", "x_{1}^{2}"),
        ("⅓", r"\frac{1}{3}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\displaystyle 5", "5"),
        ("3e", "3e"),
        (r"12\ 345", "12345"),
        (r"\boldsymbol{5}", "{5}"),
        ("2e5x", "2e5x"),
    ],
)
def test_notation(written, plain):
    assert in_plain_latex(written) == plain


def test_prose_keeps_what_marks_formulas():
    assert in_plain_prose("it costs $1\u202f234$ or \\(½\\)") == "it costs $1234$ or \\(\\frac{1}{2}\\)"


@given(
    st.text(alphabet="0123456789", max_size=3),
    st.text("0123456789", max_size=3),
    st.text("0123456789", min_size=1, max_size=3),
)
def test_repeating_decimals_have_the_value_of_their_series(whole, once, cycle):
    written = in_plain_latex(rf"{whole}.{once}\overline{{{cycle}}}")
    numerator, denominator = written.removeprefix(r"\frac{").removesuffix("}").split("}{")
    series = sum(Fraction(int(cycle), 10 ** (len(once) + len(cycle) * k)) for k in range(1, 60))
    exact = Fraction(int(whole or "0")) + Fraction(int(once or "0"), 10 ** len(once)) + series
    assert abs(Fraction(int(numerator), int(denominator)) - exact) < Fraction(1, 10**50)


@pytest.mark.parametrize(
    ("inequality", "same"),
    [
        (r"0 \le x < 1", "[0,1)"),
        (r"1 \ge x > 0", "(0,1]"),
        ("x > 3", r"(3,\infty)"),
        (r"x \leq -2", r"(-\infty,-2]"),
        (r"0 \leqslant x < 1", "[0,1)"),
        (r"2 \geq x", r"(-\infty,2]"),
        ("3 < x", r"(3,\infty)"),
        ("0 < x > 1", None),
        ("x = 3", None),
        ("5", None),
    ],
)
def test_intervals_of_inequalities(inequality, same):
    assert interval(inequality) == same


@given(st.text())
def test_any_text_has_a_notation(text):
    assert isinstance(in_plain_latex(text), str)
    assert isinstance(in_plain_prose(text), str)
