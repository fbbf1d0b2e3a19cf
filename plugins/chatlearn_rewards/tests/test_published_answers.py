"""Every published ground truth in many written forms is right; what nearly says the same is wrong.

Forms and near misses are made by rules that do not go through the graders. ``CHATLEARN_TEST_DATA`` names the folder of
``gsm8k/*.jsonl`` and ``math/*.jsonl``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby
from pathlib import Path

import pytest

from chatlearn_rewards.final_answer import last_boxed
from chatlearn_rewards.gsm8k_reward import answered_number, true_number
from chatlearn_rewards.math_grading import is_right
from chatlearn_rewards.math_reward import MathReward
from chatlearn_rewards.options import MathOptions

INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
TUPLE = re.compile(r"\((?:\\left)?(-?\d+)((?:,\s*-?\d+)+)\)")
INTERVAL = re.compile(r"([(\[])([^,()\[\]]*),([^,()\[\]]*)([)\]])")
LIST = re.compile(r"-?\d+(?:,\s*-?\d+)+")
THOUSANDS = re.compile(r"\d{1,3}(?:,(?:\\!)?\d{3})+")
DEGREES = re.compile(r"(-?\d+)\s*\^\{?\\circ\}?")
MATRIX = re.compile(r"\\begin\{([pbv])matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)


def box(text: str) -> str:
    return rf"\boxed{{{text}}}"


def written_forms(answer: str) -> Iterator[str]:
    """Completions that say ``answer``, a ground truth of MATH, in other words."""
    yield rf"\boxed{{{answer}}}"
    yield rf"Thus $x + 1$ is 7 and the answer is \[\boxed{{ {answer} }}.\]"
    yield rf"\fbox{{{answer}}}"
    yield rf"\boxed{{${answer}$}}"
    yield rf"\boxed{{\displaystyle {answer}}}"
    yield rf"<answer> {answer} </answer>"
    yield rf"\boxed{{0}} is wrong; it is \boxed{{\,{answer}\;}}"
    spread = re.sub(r"(?<=[,=])(?![\d!\\])|(?<=[+=])", r"\\ ", answer) if "\\text" not in answer else answer
    yield rf"\boxed{{{spread}}}"
    if "\\frac" in answer or "\\dfrac" in answer:
        plain = answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
        yield box(plain.replace("\\frac", "\\dfrac"))
        yield box(plain.replace("\\frac", "\\tfrac"))
    if "\\left" in answer:
        yield box(re.sub(r"\\(?:left|right)(?![a-z])", "", answer))
    elif answer[:1] in "([" and answer[-1:] in ")]":
        yield rf"\boxed{{\left{answer[:-1]}\right{answer[-1]}}}"
    if re.fullmatch(r"[a-z]+", answer) and len(answer) > 1:
        yield rf"\boxed{{\text{{{answer}}}}}"
    for number in numeric_forms(answer):
        yield rf"\boxed{{{number}}}"
    if TUPLE.fullmatch(answer):
        numbers, comma = re.findall(r"-?\d+", answer), ",\\,"
        yield box(f"({comma.join(numbers)})")
        yield rf"\boxed{{( {' , '.join(numbers)} )}}"
    if LIST.fullmatch(answer) and not THOUSANDS.fullmatch(answer):
        numbers = re.findall(r"-?\d+", answer)
        yield rf"\boxed{{{', '.join(reversed(numbers))}}}"
        yield rf"\boxed{{\{{{', '.join(numbers)}\}}}}"
        yield rf"\boxed{{{', '.join(numbers[:-1])} \text{{ and }} {numbers[-1]}}}"
    bounds = INTERVAL.fullmatch(answer)
    if bounds and (bounds[1] == "[" or bounds[4] == "]") and "infty" not in answer:
        low, high = ("\\le" if bracket in "[]" else "<" for bracket in (bounds[1], bounds[4]))
        yield rf"\boxed{{{bounds[2]} {low} x {high} {bounds[3]}}}"
        yield rf"\boxed{{x \in {answer}}}"
    degrees = DEGREES.fullmatch(answer)
    if degrees:
        yield rf"\boxed{{{degrees[1]}^{{\circ}}}}"
        yield rf"\boxed{{{degrees[1]}°}}"
        yield rf"\boxed{{{degrees[1]}\text{{ degrees}}}}"
        yield rf"\boxed{{{degrees[1]}}}"
    matrix = MATRIX.fullmatch(answer)
    if matrix:
        other = "b" if matrix[1] == "p" else "p"
        rows = matrix[2].replace("\\\\", " \\\\ ")
        yield box(rf"\begin{{{matrix[1]}matrix}}{rows}\end{{{matrix[1]}matrix}}")
        if matrix[1] != "v":
            yield rf"\boxed{{\begin{{{other}matrix}}{matrix[2]}\end{{{other}matrix}}}}"


def numeric_forms(answer: str) -> Iterator[str]:
    """Other ways to write an integer, a decimal or a fraction."""
    if INTEGER.fullmatch(answer):
        value = int(answer)
        yield f"{value}.0"
        yield f"{value}.00"
        yield rf"\frac{{{value * 3}}}{{3}}"
        yield f"x = {value}"
        yield rf"{value}\text{{ cm}}"
        yield rf"{value} \text{{ apples}}"
        yield rf"\text{{{value}}}"
        yield rf"\mathbf{{{value}}}"
        if abs(value) >= 1000:
            for comma in (",", "{,}", ",\\!", r"\,"):
                yield f"{value:,}".replace(",", comma)
        if value < 0:
            yield f"\u2212{-value}"
    elif DECIMAL.fullmatch(answer):
        value = Fraction(answer)
        yield f"{answer}0"
        yield rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
        yield re.sub(r"^(-?)0\.", r"\1.", answer) if abs(value) < 1 else f"{value.numerator}/{value.denominator}"
    elif THOUSANDS.fullmatch(answer):
        yield answer.replace(",", "").replace("\\!", "")
    fraction = FRACTION.fullmatch(answer)
    if fraction:
        sign, top, bottom = fraction[1], int(fraction[2]), int(fraction[3])
        yield f"{sign}{top}/{bottom}"
        yield f"{sign}({top}/{bottom})"
        yield rf"{sign}\frac{{{2 * top}}}{{{2 * bottom}}}"
        yield rf"\frac{{{sign}{top}}}{{{bottom}}}"
        yield f"x = {answer}"
        if top < 10 and bottom < 10:
            yield rf"{sign}\frac{top}{bottom}"
        if is_finite_decimal(bottom):
            yield sign + decimal(Fraction(top, bottom))
            yield sign + percent(Fraction(top, bottom))
        if top > bottom and top % bottom:
            yield rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"
            if not sign:
                yield rf"{top // bottom} {top % bottom}/{bottom}"


def is_finite_decimal(denominator: int) -> bool:
    """Whether a fraction of this denominator has finitely many decimals, at most six."""
    return 10**6 % denominator == 0


def decimal(value: Fraction) -> str:
    """A finite decimal without trailing zeros."""
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def percent(value: Fraction) -> str:
    return decimal(100 * value) + r"\%"


def near_misses(answer: str) -> Iterator[str]:
    """Completions that say something else than ``answer``, though nearly the same."""
    if INTEGER.fullmatch(answer):
        value = int(answer)
        for other in {value + 1, value - 1, -value, value * 10} - {value}:
            yield rf"\boxed{{{other}}}"
        digits = answer.lstrip("-")
        if len(digits) > 1:
            sign = answer[: -len(digits)]
            yield rf"\boxed{{{sign}{digits[0]}{(int(digits[1]) + 5) % 10}{digits[2:]}}}"
            if digits[0] != digits[-1]:
                yield rf"\boxed{{{sign}{digits[-1]}{digits[1:-1]}{digits[0]}}}"
        yield rf"\boxed{{{value}, {value + 1}}}"
        yield rf"\boxed{{\frac{{1}}{{{value + 1 if value != -1 else 7}}}}}" if value not in (0, 1) else r"\boxed{9}"
        yield rf"\boxed{{{value}.5}}"
    elif DECIMAL.fullmatch(answer):
        yield rf"\boxed{{{float(answer) + 1}}}"
        yield rf"\boxed{{{float(answer) * 10}}}"
        yield rf"\boxed{{{-float(answer)}}}"
    fraction = FRACTION.fullmatch(answer)
    if fraction:
        sign, top, bottom = fraction[1], int(fraction[2]), int(fraction[3])
        yield rf"\boxed{{{sign}\frac{{{top + 1}}}{{{bottom}}}}}"
        yield rf"\boxed{{{sign}\frac{{{top}}}{{{bottom + 1}}}}}"
        yield rf"\boxed{{{'' if sign else '-'}\frac{{{top}}}{{{bottom}}}}}"
        if top != bottom:
            yield rf"\boxed{{{sign}\frac{{{bottom}}}{{{top}}}}}"
        if bottom != 1:
            yield rf"\boxed{{{sign}{top}}}"
        rounded = round(top / bottom, 3)
        if abs(Fraction(str(rounded)) - Fraction(top, bottom)) > Fraction(top, 10**4 * bottom):
            yield rf"\boxed{{{sign}{rounded}}}"
    if TUPLE.fullmatch(answer):
        numbers = re.findall(r"-?\d+", answer)
        if numbers != numbers[::-1]:
            yield rf"\boxed{{({', '.join(reversed(numbers))})}}"
        yield rf"\boxed{{({', '.join([*numbers[:-1], str(int(numbers[-1]) + 1)])})}}"
        yield rf"\boxed{{({', '.join([*numbers, '1'])})}}"
        yield rf"\boxed{{{numbers[0]}}}"
    if LIST.fullmatch(answer) and not THOUSANDS.fullmatch(answer):
        numbers = re.findall(r"-?\d+", answer)
        yield rf"\boxed{{{', '.join(numbers[:-1])}}}"
        yield rf"\boxed{{{', '.join([*numbers, '9876'])}}}"
        yield rf"\boxed{{{', '.join([*numbers[:-1], str(int(numbers[-1]) + 1000)])}}}"
    bounds = INTERVAL.fullmatch(answer)
    if bounds and (bounds[1] == "[" or bounds[4] == "]" or "infty" in answer):
        if "infty" not in bounds[2]:
            yield rf"\boxed{{{'[' if bounds[1] == '(' else '('}{answer[1:]}}}"
            yield rf"\boxed{{{bounds[1]}-77,{bounds[3]}{bounds[4]}}}"
        if "infty" not in bounds[3]:
            yield rf"\boxed{{{answer[:-1]}{']' if bounds[4] == ')' else ')'}}}"
            yield rf"\boxed{{{bounds[1]}{bounds[2]},991{bounds[4]}}}"
    degrees = DEGREES.fullmatch(answer)
    if degrees:
        yield rf"\boxed{{{int(degrees[1]) + 1}^\circ}}"
    matrix = MATRIX.fullmatch(answer)
    if matrix:
        first = re.search(r"\d+", matrix[2])
        if first:
            changed = f"{matrix[2][: first.start()]}{int(first[0]) + 1}{matrix[2][first.end() :]}"
            yield rf"\boxed{{\begin{{{matrix[1]}matrix}}{changed}\end{{{matrix[1]}matrix}}}}"
    if re.search(r"[a-z](?![a-z{])", answer) and re.search(r"\d", answer) and not answer.startswith("\\text"):
        digit = re.search(r"\d", answer)
        assert digit
        yield rf"\boxed{{{answer[: digit.start()]}{(int(digit[0]) + 3) % 10}{answer[digit.end() :]}}}"
    if not re.search(r"[,=;<>%$]|\\(?:text|begin|in|cup|le|ge|pm|infty|mbox|circ|\$)(?![a-z])|_", answer):
        term = answer.rstrip(". ")
        yield rf"\boxed{{7 + {term}}}"
        yield rf"\boxed{{{term} + \frac{{1}}{{9}}.}}"
        if term != "0":
            yield rf"\boxed{{\frac{{{term}}}{{3}}}}"


def published(*names: str) -> list[dict[str, str]]:
    """Rows of the named files under ``CHATLEARN_TEST_DATA``."""
    folder = os.environ.get("CHATLEARN_TEST_DATA")
    if folder is None:
        pytest.skip(f"CHATLEARN_TEST_DATA does not name the folder that holds {', '.join(names)}")
    return [json.loads(line) for name in names for line in (Path(folder) / name).read_text().splitlines()]


def math_truths() -> list[str]:
    """The distinct ground truths of MATH, in the order of the files."""
    rows = published("math/test.jsonl", "math/train.jsonl")
    boxes = [row.get("answer") or last_boxed(row["solution"]) for row in rows]
    truths = list(dict.fromkeys(box if isinstance(box, str) else box.text for box in boxes if box is not None))
    assert len(truths) == 2047
    return truths


def shape(answer: str) -> str:
    """The pattern that an answer matches, or ``other``."""
    for pattern in (INTEGER, DECIMAL, FRACTION, THOUSANDS, TUPLE, INTERVAL, LIST, DEGREES, MATRIX):
        if pattern.fullmatch(answer):
            return pattern.pattern
    return "other"


def sampled(truths: list[str], number: int) -> list[str]:
    """The first ``number`` truths of every shape, and twice as many that match none."""
    by_shape = {name: list(group) for name, group in groupby(sorted(truths, key=shape), key=shape)}
    assert len(by_shape) == 10
    return [truth for name, group in by_shape.items() for truth in group[: 2 * number if name == "other" else number]]


def pairs(truths: list[str]) -> list[tuple[str, str, bool]]:
    """Completion, ground truth and whether the first says the second."""
    return [
        (completion, truth, right)
        for truth in truths
        for right, make in ((True, written_forms), (False, near_misses))
        for completion in dict.fromkeys(make(truth))
    ]


def test_forms_and_near_misses_of_every_shape():
    """A sample, in this process; ``test_every_form_within_its_time`` tries more."""
    found = pairs(sampled(math_truths(), 3))
    assert len(found) > 400
    assert sum(not right for _, _, right in found) > 100
    wrong = [(completion, truth) for completion, truth, right in found if is_right(completion, truth) is not right]
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_every_form_within_its_time(use, make_sample):
    """Through the reward, whose workers are killed after ``timeout_s``: none crashes and none hangs.

    Every 24th truth, or every ``CHATLEARN_ANSWER_STRIDE``-th.
    """
    truths = math_truths()[:: int(os.environ.get("CHATLEARN_ANSWER_STRIDE", "24"))]
    found = pairs(truths)
    reward = use(MathReward, MathOptions(num_workers=2, timeout_s=20.0, ungraded="exclude"))
    samples = [make_sample(completion, truth, index) for index, (completion, truth, _) in enumerate(found)]
    results = await reward.score(samples)
    failed = [(pair, result.error) for pair, result in zip(found, results, strict=True) if result.error is not None]
    assert not failed
    misjudged = [pair for pair, result in zip(found, results, strict=True) if result.value != float(pair[2])]
    assert not misjudged


def number_forms(number: str) -> Iterator[str]:
    """Completions that say a ground truth of GSM8K; a minus, digits and commas."""
    value = int(number.replace(",", ""))
    grouped = f"{value:,}"
    for written in dict.fromkeys((number, str(value), grouped, f"{value}.0", f"{value}.00")):
        yield f"Half of 9 is <<9/2=4.5>>4.5.\n#### {written}"
        yield f"#### {written}."
        yield f"#### ${written}".replace("$-", "-$")
        yield f"#### {written} apples"
        yield f"#### **{written}**"
        yield f"It is 3 + 4, so the answer is {written}."
        yield f"The answer is \\boxed{{{written}}}."
        yield f"She pays ${written} in all.".replace("$-", "-$")
        yield f"so it is {written}%"
    yield "#### " + grouped.replace(",", "\u202f").replace("-", "\u2212")
    yield rf"#### \frac{{{2 * value}}}{{2}}" if value >= 0 else f"#### {2 * value}/2"


def other_numbers(number: str) -> Iterator[str]:
    """Completions that say another number."""
    value = int(number.replace(",", ""))
    digits = str(abs(value))
    changed = f"{'-' if value < 0 else ''}{(int(digits[0]) % 9) + 1}{digits[1:]}"
    others = {value + 1, value - 1, -value, value * 10, value + 1000, int(changed), int(f"{value}7")} - {value}
    for other in sorted(others):
        yield f"It was {value} at first.\n#### {other}"
        yield f"It is not {value}, but {other:,}."
    yield f"#### {value}.5"
    yield f"#### {value}/7" if value else "#### 1/7"
    yield f"#### {value}, {value + 1}"
    yield f"#### not {value}"
    yield f"{value}, {value + 1}"


@pytest.mark.parametrize("strict", [False, True])
def test_ground_truths_of_gsm8k(strict):
    """Every third of those that are distinct; in strict mode what follows no marker is no answer."""
    rows = published("gsm8k/train.jsonl", "gsm8k/test.jsonl")
    truths = list(dict.fromkeys(row["answer"].rpartition("####")[2].strip() for row in rows))
    assert len(truths) == 983
    for truth in truths[::3]:
        value = true_number(truth)
        assert value == int(truth.replace(",", ""))
        for completion in number_forms(truth):
            expected = value if "####" in completion or not strict else None
            assert answered_number(completion, strict=strict) == expected, completion
        for completion in other_numbers(truth):
            assert answered_number(completion, strict=strict) != value, completion
