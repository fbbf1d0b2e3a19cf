"""Rewards ``multiple_choice``, ``length``, ``repetition`` and ``exact_match``, which run in the caller's process."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import RewardResult, Sample
from chatlearn_rewards.answer_text import accepted, simplified, taken, text_problem
from chatlearn_rewards.final_answer import last_boxed, last_tagged
from chatlearn_rewards.inline_reward import InlineReward, failed
from chatlearn_rewards.rule_options import (
    ExactMatchOptions,
    LengthOptions,
    MultipleChoiceOptions,
    RepetitionOptions,
)

TAIL_CHARACTERS = 400
"""Number of characters at the end of a completion in which its choice is searched."""
STATED = re.compile(
    r"\b(?:answer|choice|option)(?:\s+is|\s*[:=])[\s:*_]*(?:option\s+|choice\s+)?(?P<rest>[^\n]{0,60})", re.IGNORECASE
)
LETTER = re.compile(r"(?<![A-Za-z0-9'])([B-HJ-Z]|[AI](?!\s+(?!or\b|and\b)[a-z]))(?![A-Za-z0-9'])")
"""A capital letter by itself; not the article A or the pronoun I before a word."""
AT_END = re.compile(r"(?<![A-Za-z0-9'])[A-Z]\W*$")
ONE = re.compile(r"[\s*_$(\[{\\]*(?:(?:text|mathrm|mathbf|textbf)\{)?\(?([A-Za-z])(?![A-Za-z0-9'])")


class MultipleChoiceReward(InlineReward):
    """Component ``accuracy`` is 1 or 0."""

    def __init__(self, options: MultipleChoiceOptions, context: RoleContext) -> None:
        self._options = options
        self._role = context.role

    def judge(self, sample: Sample) -> RewardResult:
        """Return ``correct`` if the completion gives exactly one choice and it is the right one."""
        truth = true_choice(self._options, sample.prompt.ground_truth)
        if truth is None:
            problem = choice_problem(self._options, sample.prompt.ground_truth)
            return failed("multiple_choice", self._role, sample, str(problem))
        choice = chosen(sample.text, self._options)
        right = choice == truth
        value = self._options.correct if right else self._options.incorrect
        return RewardResult(value, {"accuracy": float(right)}, answer=choice)


def chosen(text: str, options: MultipleChoiceOptions) -> str | None:
    """Return the choice that a completion gives; None if it gives none or several."""
    answers = [found for found in (last_tagged(text), last_boxed(text)) if found is not None]
    if answers:
        return _only(answers[0].text, options.choices)
    tail = text[-TAIL_CHARACTERS:].rstrip()
    stated = [found["rest"] for found in STATED.finditer(tail)]
    if stated:
        return _only(stated[-1], options.choices)
    return None if options.strict else _only(tail.rpartition("\n")[2], options.choices, at_end=True)


def _only(text: str, choices: str, *, at_end: bool = False) -> str | None:
    """Return the choice at the beginning or end of a text; None if the text has another choice too."""
    letters = {letter for letter in LETTER.findall(text) if letter in choices}
    first = ONE.match(text)
    if at_end:
        if AT_END.search(text) is None:
            return None
    elif first is None or first[1].upper() not in choices or not (first[1].isupper() or len(text.strip()) <= 3):
        return None
    else:
        letters.add(first[1].upper())
    return letters.pop() if len(letters) == 1 else None


def true_choice(options: MultipleChoiceOptions, ground_truth: Any) -> str | None:
    """Return the letter of a ground truth: a letter, also in parentheses, or a choice's number from 0."""
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool):
        return options.choices[ground_truth] if 0 <= ground_truth < len(options.choices) else None
    letter = ground_truth.strip().strip("().").upper() if isinstance(ground_truth, str) else ""
    return letter if len(letter) == 1 and letter in options.choices else None


def choice_problem(options: MultipleChoiceOptions, ground_truth: Any) -> str | None:
    """Return why no completion can be right for this ground truth, or None if one can."""
    if true_choice(options, ground_truth) is not None:
        return None
    last = len(options.choices) - 1
    return (
        f"has the ground truth {ground_truth!r}; it must be a letter of {options.choices}, or a number from 0 to {last}"
    )


class LengthReward(InlineReward):
    """Component ``length`` is the length itself."""

    def __init__(self, options: LengthOptions, context: RoleContext) -> None:
        self._options = options

    def judge(self, sample: Sample) -> RewardResult:
        """Return a reward between ``outside`` and ``inside``, by the distance to the nearest limit."""
        options = self._options
        length = len(sample.completion_ids) if options.unit == "tokens" else len(sample.text)
        shortest, longest = options.limits
        beyond = max(shortest - length, length - longest, 0.0)
        share = 1.0 if beyond == 0 else max(0.0, 1 - beyond / (options.band + 1))
        return RewardResult(options.outside + (options.inside - options.outside) * share, {"length": float(length)})


class RepetitionReward(InlineReward):
    """Component ``repeated`` is the share of n-grams that occurred before."""

    def __init__(self, options: RepetitionOptions, context: RoleContext) -> None:
        self._options = options

    def judge(self, sample: Sample) -> RewardResult:
        """Return 0 up to ``tolerated``, the fraction of repeated n-grams; above it, fall linearly to ``penalty``."""
        options = self._options
        units: Sequence[Hashable] = (
            sample.completion_ids.tolist() if options.unit == "tokens" else sample.text.lower().split()
        )
        share = repeated_share(units, options.n)
        over = max(0.0, share - options.tolerated) / (1 - options.tolerated)
        return RewardResult(options.penalty * over + 0.0, {"repeated": share})


def repeated_share(units: Sequence[Hashable], n: int) -> float:
    """1 − (different n-grams) / (n-grams), after 2502.03373, appendix C.2; 0 of fewer than ``n`` units."""
    total = len(units) - n + 1
    return 1 - len(set(zip(*(units[start:] for start in range(n)), strict=False))) / total if total > 0 else 0.0


class ExactMatchReward(InlineReward):
    """Component ``accuracy`` is 1 or 0."""

    def __init__(self, options: ExactMatchOptions, context: RoleContext) -> None:
        self._options = options
        self._role = context.role

    def judge(self, sample: Sample) -> RewardResult:
        """Return ``correct`` if the text equals the ground truth, or one of several ground truths."""
        options, truth = self._options, sample.prompt.ground_truth
        wanted = accepted(truth)
        if wanted is None:
            return failed("exact_match", self._role, sample, str(text_problem(options, truth)))
        text = taken(sample.text, options.take)
        answer = None if text is None else self._simplified(text) or None
        truths = [self._simplified(one) for one in wanted]
        right = answer in truths
        return RewardResult(
            options.correct if right else options.incorrect,
            {"accuracy": float(right)},
            answer=truths[0] if right else answer,  # all right answers are one
        )

    def _simplified(self, text: str) -> str:
        options = self._options
        return simplified(
            text, case=options.ignore_case, punctuation=options.ignore_punctuation, articles=options.ignore_articles
        )
