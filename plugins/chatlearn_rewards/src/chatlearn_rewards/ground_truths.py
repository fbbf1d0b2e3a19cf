"""Checks, when data are loaded, whether ``math`` and ``gsm8k`` can grade against a row's ground truth.

Cheap and without math-verify. Before the run starts, an error names file and line of a row whose answer is cut short or
missing; otherwise every sample of that prompt would fail.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from numbers import Real
from typing import Any

from chatlearn_rewards.final_answer import has_open_box, last_boxed
from chatlearn_rewards.gsm8k_reward import true_number
from chatlearn_rewards.options import Gsm8kOptions, MathOptions

TOKENS = re.compile(r"\\.|[{}]", re.DOTALL)
UNFINISHED = re.compile(r"\\(?:[dt]?frac|d?binom|sqrt|text|boxed|left|right)?\s*$")
HOLLOW = re.compile(r"[\s\[\](){},;.$]*")


def math_problem(options: MathOptions, ground_truth: Any) -> str | None:
    """Return why no completion can be right for reward ``math`` with this ground truth, or None if one can."""
    rule = "it must be an expression, or a solution that puts one in \\boxed{}"
    if ground_truth is None:
        return f"has no ground truth; {rule}"
    if isinstance(ground_truth, Decimal | Real) and not isinstance(ground_truth, bool):
        return None if math.isfinite(ground_truth) else f"has the ground truth {ground_truth!r}; it must be finite"
    if not isinstance(ground_truth, str):
        return f"has the ground truth {ground_truth!r}, a {type(ground_truth).__name__}; {rule}"
    boxed = last_boxed(ground_truth)
    text = boxed.text if boxed else ground_truth
    if HOLLOW.fullmatch(text):
        return f"has the empty ground truth {ground_truth!r}; {rule}"
    if boxed is None and (has_open_box(ground_truth) or not _is_balanced(ground_truth) or UNFINISHED.search(text)):
        return f"has the ground truth {ground_truth!r}, which is cut short; {rule}"
    return None


def gsm8k_problem(options: Gsm8kOptions, ground_truth: Any) -> str | None:
    """Return why no completion can be right for reward ``gsm8k`` with this ground truth, or None if one can."""
    if true_number(ground_truth) is not None:
        return None
    return f"has the ground truth {ground_truth!r}, which has no number; it must be a number or end in '#### NUMBER'"


def _is_balanced(text: str) -> bool:
    depth = 0
    for token in TOKENS.findall(text):
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return False
    return depth == 0
