"""The part of a completion that text rewards compare, and the ground truths that they compare it with."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from chatlearn_rewards.final_answer import last_boxed, last_tagged
from chatlearn_rewards.rule_options import Take

ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
PUNCTUATION = str.maketrans("", "", string.punctuation)
RULE = "it must be a text or a number, or a list of these, of which a completion must match one"


def taken(text: str, take: Take) -> str | None:
    """Return the compared part of a completion without surrounding spaces; None if the completion lacks it."""
    if take == "whole":
        return text.strip()
    if take == "last_line":
        return text.strip().rpartition("\n")[2].strip()
    answers = [found for found in (last_tagged(text), last_boxed(text)) if found is not None]
    return answers[0].text.strip() if answers else None


def accepted(ground_truth: Any) -> list[str] | None:
    """Return the texts that a completion may equal; None if the ground truth has none."""
    if hasattr(ground_truth, "tolist"):
        ground_truth = ground_truth.tolist()  # lists of a parquet file come as arrays
    many = isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str | bytes)
    values = list(ground_truth) if many else [ground_truth]
    if not values or not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
        return None
    texts = [str(value).strip() for value in values]
    return texts if all(texts) else None


def text_problem(options: Any, ground_truth: Any) -> str | None:
    """Return why no completion can match this ground truth, or None if one can."""
    if accepted(ground_truth) is not None:
        return None
    return f"has the ground truth {_short(ground_truth)}; {RULE}"


def simplified(text: str, *, case: bool, punctuation: bool = False, articles: bool = False) -> str:
    """Return a text without the parts that the options ignore; each run of spaces becomes one space."""
    if case:
        text = text.casefold()
    if punctuation:
        text = text.translate(PUNCTUATION)
    if articles:
        text = ARTICLES.sub(" ", text)
    return " ".join(text.split())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
