"""Grades answers in the workers of reward ``math``. Only workers import it, because it imports math-verify (sympy)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from chatlearn_rewards.answer_keys import expression_key
from chatlearn_rewards.answer_notation import in_plain_latex, in_plain_prose, interval
from chatlearn_rewards.final_answer import last_boxed, last_tagged
from chatlearn_rewards.strict_grading import objection_to_answer, objection_to_context, objection_to_statement

TAIL_CHARACTERS = 4000
"""Number of characters at the end of a completion without a box in which the final expression is searched."""
MAX_ANSWER_CHARACTERS = 1000
"""Longer answers are right only if they equal the ground truth letter by letter: parsing takes more than linear time,
and the longest published ground truth of MATH has about 200 characters."""
TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
SPACING = re.compile(r"\\[!,;: ]|\\q?quad(?![a-z])|\\(?:left|right)(?![a-z])|[\s$~]")
SPACES = re.compile(r" {2,}")
IDLE_SPACE = re.compile(r"(?<!\w) | (?!\w)")
"""Matches spaces without meaning. Between two word characters a space has one: 3 1/2 is not 31/2."""

# math-verify's own time limits use SIGALRM; the pool's limit is a hard kill instead.
NO_LIMIT = None
EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns once that its timeouts are off


def build_math_grader(require_boxed: bool, strict: bool = True) -> Callable[[tuple[str, str]], Mapping[str, Any]]:
    """Return a function of ``(completion, ground truth)`` that tells whether they are equal."""
    parse("$1$", EXTRACTION, parsing_timeout=NO_LIMIT)  # builds the grammar before the first sample's clock runs

    def grade(payload: tuple[str, str]) -> Mapping[str, Any]:
        completion, truth = payload
        right = is_right(completion, truth, require_boxed=require_boxed, strict=strict)
        if right:  # one key, however the answer is written
            return {"right": True, "answer": answer_key(truth if last_boxed(truth) else f"\\boxed{{{truth}}}")}
        return {"right": False, "answer": answer_key(completion, require_boxed)}

    return grade


def is_right(completion: str, truth: str, *, require_boxed: bool = False, strict: bool = True) -> bool:
    """Whether the final answer of ``completion`` equals ``truth``.

    The final answer is the content of the last ``\\boxed{}``. Unless ``require_boxed`` is set, a completion without a
    box gives the content of its last ``<answer>`` tag, or else its last expression.

    Args:
        completion: text of the completion.
        truth: an expression, or a solution that boxes one.
        require_boxed: an answer outside ``\\boxed{}`` is wrong.
        strict: refuse the answers that ``strict_grading`` names (lists of guesses, negations, other units, ...),
            although math-verify accepts them.
    """
    boxed_truth = last_boxed(truth)
    gold = in_plain_latex(boxed_truth.text if boxed_truth else truth)
    found = last_boxed(completion)
    if found is None and require_boxed:
        return False
    found = found or last_tagged(completion)
    if found is None:
        return _statement_is_right(completion, gold, strict)
    if strict and objection_to_context(found.before):
        return False
    answer = in_plain_latex(found.text)
    if _plain(answer) == _plain(gold):
        return True
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    if not any(_equal(left, right) for left, right in _readings(gold, answer)):
        return False
    return not strict or objection_to_answer(answer, gold, _parse_answer) is None


def answer_key(text: str, require_boxed: bool = False) -> str | None:
    """The final answer of a text in a form that equal answers share where ``expression_key`` can tell; otherwise
    without what does not change its meaning. None if there is none.
    """
    found = last_boxed(text)
    if found is None and require_boxed:
        return None
    found = found or last_tagged(text)
    if found is None:
        parsed = _parse_statement(in_plain_prose(text[-TAIL_CHARACTERS:]))
        return (expression_key(parsed[0]) or str(parsed[-1])) if parsed else None
    answer = in_plain_latex(found.text)
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return _plain(answer)
    parsed = _parse_answer(interval(answer) or answer)
    return (expression_key(parsed[0]) if parsed else None) or _plain(answer) or None


def _statement_is_right(completion: str, gold: str, strict: bool) -> bool:
    """Whether the last expression of a completion that marks no answer equals ``gold``."""
    tail = in_plain_prose(completion[-TAIL_CHARACTERS:])
    if len(completion) <= MAX_ANSWER_CHARACTERS and _plain(tail) == _plain(gold):
        return True

    def equals(text: str) -> bool:
        answered = list(_parse_statement(text))
        return bool(answered) and verify(list(_parse_answer(gold)), answered, timeout_seconds=NO_LIMIT)

    return equals(tail) and (not strict or objection_to_statement(tail, gold, equals) is None)


def _readings(gold: str, answer: str) -> Iterator[tuple[str, str]]:
    """Pairs to compare: as written, and an inequality on one side as the interval that it describes."""
    yield gold, answer
    gold_interval, answer_interval = interval(gold), interval(answer)
    if answer_interval is not None and gold_interval is None:
        yield gold, answer_interval
    if gold_interval is not None and answer_interval is None:
        yield gold_interval, answer


def _equal(gold: str, answer: str) -> bool:
    answered = list(_parse_answer(answer))
    return bool(answered) and verify(list(_parse_answer(gold)), answered, timeout_seconds=NO_LIMIT)


@lru_cache(maxsize=16)
def _parse_statement(text: str) -> tuple[Any, ...]:
    """The last expression of a text that marks no answer."""
    return tuple(parse(text, EXTRACTION, parsing_timeout=NO_LIMIT))


@lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """An answer without surroundings; a group shares its ground truth, so the last ones are kept."""
    return tuple(
        parse(f"\\boxed{{{answer}}}", EXTRACTION, parsing_timeout=NO_LIMIT)
        or parse(answer, EXTRACTION, parsing_timeout=NO_LIMIT)
    )


def _plain(answer: str) -> str:
    """An answer without what does not change its meaning; two that are equal then need no algebra."""
    answer = TEXT_COMMAND.sub(r"\1", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return IDLE_SPACE.sub("", SPACES.sub(" ", SPACING.sub(" ", answer))).rstrip(".")
