"""What the workers of reward ``math`` do; imports math-verify (sympy), so it is imported in workers only."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

TAIL_CHARACTERS = 4000
"""Where the final expression is looked for when nothing is boxed."""
BOXED = re.compile(r"\\f?boxed\s*\{")
TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SPACING = re.compile(r"\\[!,;: ]|\\q?quad(?![a-z])|\\(?:left|right)(?![a-z])|[\s$~]")
IDLE_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")
"""Between two word characters a space means something: 3 1/2 is not 31/2."""

# math-verify's own time limits use SIGALRM; the pool's limit is a hard kill instead.
NO_LIMIT = None
EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its timeouts are off


def build_math_grader(require_boxed: bool) -> Callable[[tuple[str, str]], Mapping[str, Any]]:
    """A function of ``(completion, ground truth)`` that says whether they are equal."""
    parse("$1$", EXTRACTION, parsing_timeout=NO_LIMIT)  # builds the grammar before the first sample's clock runs

    def grade(payload: tuple[str, str]) -> Mapping[str, Any]:
        completion, truth = payload
        return {"right": is_right(completion, truth, require_boxed=require_boxed)}

    return grade


def is_right(completion: str, truth: str, *, require_boxed: bool = False) -> bool:
    """Whether the final answer of ``completion`` equals ``truth``.

    The final answer is what the last ``\\boxed{}`` holds; without one, unless ``require_boxed``, what the last
    ``<answer>`` tag holds, and without that the last expression.
    """
    gold = last_boxed(truth) or truth
    answer = last_boxed(completion)
    if answer is None and not require_boxed:
        tagged = ANSWER_TAG.findall(completion)
        answer = tagged[-1] if tagged else None
    if answer is None:
        if require_boxed:
            return False
        if _plain(completion) == _plain(gold):
            return True
        answered = parse(completion[-TAIL_CHARACTERS:], EXTRACTION, parsing_timeout=NO_LIMIT)
    elif _plain(answer) == _plain(gold):
        return True
    else:
        answered = list(_parse_answer(answer))
    return bool(answered) and verify(list(_parse_answer(gold)), answered, timeout_seconds=NO_LIMIT)


def last_boxed(text: str) -> str | None:
    """What the last complete ``\\boxed{}`` holds, braces matched; None without one."""
    for found in reversed(list(BOXED.finditer(text))):
        depth = 1
        for position in range(found.end(), len(text)):
            character = text[position]
            if character == "\\":
                continue
            escaped = text[position - 1] == "\\" and text[position - 2] != "\\"
            depth += 0 if escaped else (character == "{") - (character == "}")
            if depth == 0:
                return text[found.end() : position]
    return None


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
    return IDLE_SPACE.sub("", SPACING.sub(" ", answer)).rstrip(".")
