from __future__ import annotations

import json
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from chatlearn_core.protocols import Reward
from chatlearn_rewards.gsm8k_reward import Gsm8kReward, answered_number, true_number
from chatlearn_rewards.options import Gsm8kOptions

# Answers in the shape of openai/grade-school-math: calculations in << >>, the number after ####.
ROWS = [
    ("She sold 48/2 = <<48/2=24>>24 clips in May, 48+24 = <<48+24=72>>72 altogether.\n#### 72", "72"),
    ("An hour is 60 minutes, so 12/60 = $<<12/60=0.2>>0.2 a minute: 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10", "10"),
    ("He makes 4000 - 1500 = 2500\n#### 2,500", "2500"),
    ("The profit is 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70,000", "70000"),
    ("The temperature falls to 3 - 8 = -5\n#### -5", "-5"),
    ("Each gets 7 / 2 = 3.5\n#### 3.5", "3.5"),
    ("1,234,567 in all.\n#### 1,234,567", "1234567"),
    ("It is a loss of $12.50\n#### -12.50", "-12.5"),
    ("Half of 1 is .5\n#### .5", "0.5"),
    ("Nothing is left.\n#### 0", "0"),
]


@pytest.mark.parametrize(("text", "number"), ROWS)
def test_published_answers(text, number):
    assert true_number(text) == Fraction(number)
    assert answered_number(text, strict=True) == Fraction(number)


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("#### 72", "72", "72"),
        ("####72", "72", "72"),
        ("####\n72", "72", "72"),
        ("#### $1,234.50 dollars", "1234.5", "1234.5"),
        ("#### 72.", "72", "72"),
        ("#### 72 apples, 5 pears", "72", "72"),
        ("#### 1 then again #### 2", "2", "2"),
        ("#### -$5", "-5", "-5"),
        ("#### $-5", "-5", "-5"),
        ("#### \u22125", "-5", "-5"),
        ("#### 25%", "25", "25"),
        ("#### **18**", "18", "18"),
        ("#### none\n9", None, "9"),
        ("so 3 and then 5", None, "5"),
        ("The answer is 12.", None, "12"),
        ("10-4", None, "4"),
        ("it is 10 - 4 = 6", None, "6"),
        ("x = -6", None, "-6"),
        ("costs $3.00", None, "3"),
        ("\\boxed{42}", None, "42"),
        ("#### 3/4", "3/4", "3/4"),
        ("#### -3/4", "-3/4", "-3/4"),
        ("#### 3 1/2", "7/2", "7/2"),
        ("#### \\frac{3}{4}", "3/4", "3/4"),
        ("#### 3e5", "300000", "300000"),
        ("#### 2.5E-1", "1/4", "1/4"),
        ("#### 3/0", None, None),
        ("#### [3, 4, 5]", None, None),
        ("#### 3, 4 or 5", None, None),
        ("#### 3 and 4", None, None),
        ("#### 3 4 5", None, None),
        ("#### 3|4", None, None),
        ("#### 3=4", None, None),
        ("#### not 3", None, None),
        ("#### 2^3", None, None),
        ("#### 3*4", None, None),
        ("#### 12 345", "12345", "12345"),
        ("#### 3 apples and 1 pear", "3", "3"),
        ("#### 1,234, 5", None, None),
        ("#### 12,345,678", "12345678", "12345678"),
        ("so it is 3/4.", None, "3/4"),
        ("1,2,3", None, None),
        ("12,34", None, None),
        ("he has 3 pears, and 4 apples", None, "4"),
        ("#### " + "9" * 5000, None, None),
        ("9" * 100_000, None, None),
        ("no number", None, None),
        ("####", None, None),
        ("", None, None),
    ],
)
def test_numbers_in_completions(text, strict, loose):
    assert answered_number(text, strict=True) == (None if strict is None else Fraction(strict))
    assert answered_number(text, strict=False) == (None if loose is None else Fraction(loose))


@pytest.mark.parametrize(
    ("truth", "number"),
    [
        (72, "72"),
        (3.5, "3.5"),
        ("72", "72"),
        ("1,000", "1000"),
        (np.int64(7), "7"),
        ("$18", "18"),
        (Decimal("0.10"), "0.1"),
    ],
)
def test_ground_truths(truth, number):
    assert true_number(truth) == Fraction(number)


@pytest.mark.parametrize("truth", [None, "", "many", True, float("nan"), float("inf"), [1]])
async def test_a_ground_truth_without_a_number_is_an_error_of_that_sample(truth, use, make_sample):
    reward = use(Gsm8kReward, Gsm8kOptions())
    bad, good = await reward.score([make_sample("#### 1", truth, 7), make_sample("#### 1", "1")])
    assert bad.value is None
    assert "of prompt 'p7' has no number" in bad.error
    assert good.value == 1.0


async def test_values_and_accuracy(use, make_sample):
    reward = use(Gsm8kReward, Gsm8kOptions(correct=2.0, incorrect=-0.5))
    assert isinstance(reward, Reward)
    right, wrong, loose = await reward.score([make_sample(t, "#### 72") for t in ("#### 72.0", "#### 71", "so 72")])
    assert (right.value, right.components) == (2.0, {"accuracy": 1.0})
    assert (wrong.value, wrong.components) == (-0.5, {"accuracy": 0.0})
    assert loose.components == {"accuracy": 1.0}
    strict = use(Gsm8kReward, Gsm8kOptions(strict=True))
    assert (await strict.score([make_sample("so 72", "72")]))[0].value == 0.0


async def test_the_real_answers_score_full_marks(use, make_sample):
    folder = os.environ.get("CHATLEARN_TEST_DATA")
    if folder is None:
        pytest.skip("CHATLEARN_TEST_DATA does not name the folder that holds gsm8k/test.jsonl")
    answers = [json.loads(line)["answer"] for line in (Path(folder) / "gsm8k/test.jsonl").read_text().splitlines()]
    reward = use(Gsm8kReward, Gsm8kOptions(strict=True))
    results = await reward.score([make_sample(a, a.rpartition("####")[2].strip()) for a in answers])
    assert len(results) == 1319
    assert all(result.value == 1.0 for result in results)
