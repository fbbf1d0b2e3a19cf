r"""Extracts answers from worked solutions: the number after ``####``, the content of ``\boxed{}``."""

from __future__ import annotations

import re

from chatlearn_core.exceptions import DataError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""Instruction after a GSM8K question; the usual wording, so that accuracies are comparable."""
MATH_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
"""Instruction after a MATH problem; the usual wording, so that accuracies are comparable."""

_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's calculator annotations, such as ``<<48/2=24>>``, which are meant for a tool."""
_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"[^\s$]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def instructed(question: str, instruction: str) -> str:
    """Return the question with the instruction on a new line. A blank question stays blank."""
    return f"{question.strip()}\n{instruction}" if instruction and question.strip() else question.strip()


def gsm8k_answer(answer: str) -> str:
    """Return the number after the last ``####``, without thousands separators or a dollar sign.

    Raises:
        DataError: there is no ``####``, or no number after it.
    """
    _, mark, tail = answer.rpartition("####")
    if not mark:
        raise DataError(f"no answer: column 'answer' must end in '#### NUMBER', it ends in {answer[-40:]!r}")
    number = tail.strip().replace(",", "").replace("$", "").removesuffix(".")
    if not _NUMBER.fullmatch(number):
        raise DataError(f"no answer: what follows '####' in column 'answer' must be a number, it is {tail.strip()!r}")
    return number


def gsm8k_solution(answer: str) -> str:
    """Return the worked answer without calculator annotations."""
    return _CALCULATOR.sub("", answer)


def math_answer(solution: str, answer: str | None = None) -> str:
    r"""Return ``answer`` if it is given, otherwise the content of the solution's last ``\boxed``.

    Raises:
        DataError: there is neither.
    """
    if answer is not None and answer.strip():
        return answer.strip()
    boxed = last_boxed(solution)
    if boxed is None or not boxed.strip():
        raise DataError(
            f"no answer: no column 'answer', and no \\boxed{{...}} in column 'solution' ({solution[-40:]!r})"
        )
    return boxed.strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}``, with matched braces; also for ``\boxed 5``.

    None if there is none or its brace is never closed. Escaped braces, ``\{`` and ``\}``, do not count.
    """
    marks = list(_BOXED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :]
    if not rest.startswith("{"):
        bare = _BARE.match(rest)
        return bare.group().rstrip(".,") if bare else None
    depth = 0
    escaped = False
    for index, character in enumerate(rest):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return rest[1:index]
    return None
