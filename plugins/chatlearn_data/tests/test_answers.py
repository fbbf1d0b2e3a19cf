"""Answers inside worked solutions."""

from __future__ import annotations

import pytest

from chatlearn_core.exceptions import DataError
from chatlearn_data.answers import gsm8k_answer, gsm8k_solution, instructed, last_boxed, math_answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{\frac{135}{2}}$", r"\frac{135}{2}"),
        (r"\boxed{\left(1,\frac{9}{2}\right)}", r"\left(1,\frac{9}{2}\right)"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\fbox{3}", "3"),
        (r"\boxed {4}", "4"),
        (r"$\boxed 5$", "5"),
        (r"$\boxed5$.", "5"),
        (r"\boxed\pi$", r"\pi"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxedtext{1}", None),
        ("none", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so\n#### 72", "72"),
        ("#### 1,080", "1080"),
        ("#### -7 ", "-7"),
        ("#### $10", "10"),
        ("#### 0.5", "0.5"),
        ("#### 1 #### 2.", "2"),
    ],
)
def test_gsm8k_answer(answer: str, number: str) -> None:
    assert gsm8k_answer(answer) == number


@pytest.mark.parametrize(("answer", "reason"), [("so 72", "must end in '#### NUMBER'"), ("#### ten", "it is 'ten'")])
def test_gsm8k_answer_that_is_none(answer: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        gsm8k_answer(answer)


def test_calculator_annotations_are_removed() -> None:
    assert gsm8k_solution("48/2 = <<48/2=24>>24 clips") == "48/2 = 24 clips"


def test_math_answer_prefers_the_answer_column() -> None:
    assert math_answer(r"\boxed{0.5}", r"\frac12") == r"\frac12"
    assert math_answer(r"\boxed{ 0.5 }", " ") == "0.5"
    with pytest.raises(DataError, match=r"no answer: no column 'answer', and no \\boxed"):
        math_answer("it is 7")


def test_an_instruction_does_not_make_a_blank_question_look_filled() -> None:
    assert instructed(" Why? ", "Say.") == "Why?\nSay."
    assert instructed("Why?", "") == "Why?"
    assert instructed(" ", "Say.") == ""
