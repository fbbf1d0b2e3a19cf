r"""Arithmetic word problems from a seed, so that no download is needed.

A problem is an operation with two operands; its text is one of many wordings. Splits share no problem, so held-out
accuracy measures arithmetic, not memory: ``a + b`` and ``b + a`` are one problem. Every text consists of the pieces
that ``vocabulary`` lists, with each digit a piece, so that a tokenizer with about a hundred tokens covers it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatlearn_core.exceptions import DataError

Operation = Literal["add", "subtract"]
AnswerStyle = Literal["boxed", "hash"]

OPERATIONS: tuple[Operation, ...] = ("add", "subtract")
PIECE = re.compile(r"\\boxed\{|####|\d|[A-Za-z]+|[^\w\s]")
"""One piece of a text, as in ``vocabulary``: a word-level tokenizer splits by this pattern."""

_SYMBOLS: dict[Operation, str] = {"add": "+", "subtract": "-"}
_NAMES = {
    "he": ("Tom", "Sam", "Ben", "Max", "Leo", "Omar", "Ivan", "Paul"),
    "she": ("Mia", "Ana", "Eva", "Zoe", "Lily", "Rosa", "Nina", "Jane"),
}
_THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "cards", "cookies", "stones")
_TEMPLATES: dict[Operation, tuple[str, ...]] = {
    "add": (
        "{name} has {left} {things}. {Pronoun} finds {right} more. How many {things} does {name} have now?",
        "{name} has {left} {things} and {other} has {right} {things}. How many {things} do they have together?",
        "There are {left} {things} in a box. {name} puts in {right} more. How many {things} are in the box now?",
        "{name} buys {left} {things} on Monday and {right} {things} on Friday. How many {things} does {pronoun} buy?",
        "{other} gives {name} {right} {things}. {name} had {left} {things} before. How many {things} does {name} have?",
    ),
    "subtract": (
        "{name} has {left} {things}. {Pronoun} loses {right}. How many {things} does {name} have now?",
        "{name} has {left} {things} and gives {right} to {other}. How many {things} are left?",
        "There are {left} {things} in a box. {name} takes out {right}. How many {things} are in the box now?",
        "{name} has {left} {things} and {other} has {right} {things}. How many more {things} does {name} have?",
        "{name} needs {left} {things} and has {right}. How many more {things} does {pronoun} need?",
    ),
}
_FILLINGS = re.compile(r"\{\w+\}")


@dataclass(slots=True, frozen=True, order=True)
class Problem:
    """``left`` plus or minus ``right``."""

    operation: Operation
    left: int
    right: int

    @property
    def answer(self) -> int:
        return self.left + self.right if self.operation == "add" else self.left - self.right

    @property
    def key(self) -> tuple[Operation, int, int]:
        """Key that is equal for equal problems: in an addition the order of the operands does not matter."""
        if self.operation == "add":
            return (self.operation, min(self.left, self.right), max(self.left, self.right))
        return (self.operation, self.left, self.right)


@dataclass(slots=True, frozen=True)
class Splits:
    """Problems for training, for choosing settings, and for the final evaluation; each problem is in only
    one of them.
    """

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    heldout: tuple[Problem, ...]


def problems(operations: Sequence[str] = OPERATIONS, max_operand: int = 49, min_operand: int = 10) -> list[Problem]:
    """Return every problem once: sums of two operands in the range, and differences that undo such a sum.

    The second operand and the answer of a difference are in the range. A sum has its smaller operand first.

    Raises:
        DataError: an operation is unknown, or the range is empty.
    """
    unknown = [operation for operation in operations if operation not in OPERATIONS]
    if unknown or not operations:
        raise DataError(f"operations are {', '.join(OPERATIONS)}, not {', '.join(unknown) or 'none at all'}")
    if not 0 <= min_operand <= max_operand:
        raise DataError(
            f"operands from {min_operand} to {max_operand}: the smallest must be at least 0 and at most the largest"
        )
    operands = range(min_operand, max_operand + 1)
    made: list[Problem] = []
    if "add" in operations:
        made += [Problem("add", small, large) for large in operands for small in range(min_operand, large + 1)]
    if "subtract" in operations:
        made += [Problem("subtract", answer + right, right) for answer in operands for right in operands]
    return made


def split_problems(all_problems: Sequence[Problem], *, validation: int, heldout: int, seed: int) -> Splits:
    """Hold out ``heldout`` and ``validation`` problems; the others are for training.

    The same seed and ``heldout`` give the same held-out problems for any ``validation``.

    Raises:
        DataError: there are too few problems.
    """
    shuffled = sorted(all_problems)
    random.Random(f"split/{seed}").shuffle(shuffled)
    if heldout + validation >= len(shuffled):
        raise DataError(
            f"{heldout} held-out and {validation} validation problems leave none of {len(shuffled)} to train on; "
            "request fewer, or raise max_operand"
        )
    rest = shuffled[heldout:]
    splits = Splits(tuple(rest[validation:]), tuple(rest[:validation]), tuple(shuffled[:heldout]))
    check_disjoint({"train": splits.train, "validation": splits.validation, "heldout": splits.heldout})
    return splits


def check_disjoint(splits: Mapping[str, Iterable[Problem]]) -> None:
    """Check that no two splits share a problem, regardless of its wording and, for sums, its order.

    Raises:
        DataError: names a shared problem and both splits.
    """
    seen: dict[tuple[Operation, int, int], str] = {}
    for name, members in splits.items():
        for problem in members:
            other = seen.setdefault(problem.key, name)
            if other != name:
                operation, left, right = problem.key
                raise DataError(f"{left} {_SYMBOLS[operation]} {right} is in the splits '{other}' and '{name}'")


def render(problem: Problem, rng: random.Random, wording: int | None = None) -> str:
    """Return the problem in words; draws names and things from ``rng``, and the wording too unless its
    number is given.
    """
    if wording is None:
        wording = rng.randrange(num_wordings(problem.operation))
    pronoun = rng.choice(sorted(_NAMES))
    name = rng.choice(_NAMES[pronoun])
    other = rng.choice([n for names in _NAMES.values() for n in names if n != name])
    return _TEMPLATES[problem.operation][wording].format(
        name=name,
        other=other,
        pronoun=pronoun,
        Pronoun=pronoun.capitalize(),
        things=rng.choice(_THINGS),
        left=problem.left,
        right=problem.right,
    )


def num_wordings(operation: Operation) -> int:
    """Return the number of wordings of an operation."""
    return len(_TEMPLATES[operation])


def solution(problem: Problem, style: AnswerStyle = "boxed", *, worked: bool = True) -> str:
    r"""Return an answer to imitate.

    Args:
        problem: the problem.
        style: ``boxed`` ends in ``\boxed{41}``, ``hash`` in ``#### 41``.
        worked: whether to show the working, column by column from the units as in school, with the carry or the
            borrowed
            ten in every column: ``23+18:3+8=11,2+1+1=4:\boxed{41}`` and ``41-18:11-8=3,4-1-1=2:\boxed{23}``. Otherwise
                only
            the result, ``\boxed{41}``.
    """
    answer = f"\\boxed{{{problem.answer}}}" if style == "boxed" else f"#### {problem.answer}"
    if not worked:
        return answer
    sign = _SYMBOLS[problem.operation]
    return f"{problem.left}{sign}{problem.right}:{','.join(_columns(problem))}:{answer}"


def _columns(problem: Problem) -> Iterator[str]:
    """Yield one step per column of digits; in all but the last, the sum or minuend has two digits, to show
    every carry.
    """
    num_columns = max(len(str(problem.left)), len(str(problem.right)))
    carry = 0
    for column in range(num_columns):
        left, right = problem.left // 10**column % 10, problem.right // 10**column % 10
        before = f"{'+' if problem.operation == 'add' else '-'}{carry}" if column else ""
        last = column == num_columns - 1
        if problem.operation == "add":
            total = left + right + carry
            yield f"{left}+{right}{before}={total if last else f'{total:02d}'}"
            carry = total // 10
        else:
            borrow = int(left - right - carry < 0)
            shown = left if last else f"{borrow}{left}"
            yield f"{shown}-{right}{before}={10 * borrow + left - right - carry}"
            carry = borrow


def vocabulary() -> list[str]:
    """Return every piece that ``render`` and ``solution`` can write, sorted; a number is written digit by digit."""
    words = {piece for templates in _TEMPLATES.values() for t in templates for piece in PIECE.findall(_blank(t))}
    words |= {name for names in _NAMES.values() for name in names} | set(_THINGS)
    words |= {form for pronoun in _NAMES for form in (pronoun, pronoun.capitalize())}
    words |= {*_SYMBOLS.values(), *"=,:0123456789", "\\boxed{", "}", "####"}
    return sorted(words)


def _blank(template: str) -> str:
    return _FILLINGS.sub(" ", template)


def prompt_records(members: Sequence[Problem], split: str, num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield ``num`` rows in the format ``verifiable``: cycles through the problems, with new wordings each time.

    The order of a sum's operands is random too.
    """
    for index, problem, _, text in _worded(members, split, num, seed):
        yield {
            "id": f"arithmetic/{split}/{index}",
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": _extra_info(problem, split, index),
        }


def demonstration_records(
    members: Sequence[Problem],
    split: str,
    num: int,
    seed: int,
    style: AnswerStyle = "boxed",
    worked_shares: Sequence[float] = (1.0,),
) -> Iterator[dict[str, Any]]:
    """Yield ``num`` rows in the format ``sft``: answers to imitate.

    ``worked_shares`` gives for each wording in turn, cyclically, how often an answer shows its working. A corpus in
    which some kinds of questions are mostly answered without working leaves something for reinforcement learning to
    discover.
    """
    habit = random.Random(f"{split}/{seed}/working")
    for index, problem, wording, text in _worded(members, split, num, seed):
        worked = habit.random() < worked_shares[wording % len(worked_shares)]
        yield {
            "id": f"arithmetic/{split}/{index}",
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": text}],
            "completion": solution(problem, style, worked=worked),
            "ground_truth": str(problem.answer),
            "extra_info": _extra_info(problem, split, index),
        }


def problem_of(record: Mapping[str, Any]) -> Problem:
    """Return the problem of a row; also accepts the ``columns`` of a ``Prompt``."""
    info = record["extra_info"]
    return Problem(info["operation"], int(info["left"]), int(info["right"]))


def _worded(members: Sequence[Problem], split: str, num: int, seed: int) -> Iterator[tuple[int, Problem, int, str]]:
    rng = random.Random(f"{split}/{seed}")
    order: list[Problem] = []
    for index in range(num):
        if not order:
            order = list(members)
            rng.shuffle(order)
        problem = order.pop()
        if problem.operation == "add" and rng.random() < 0.5:
            problem = Problem("add", problem.right, problem.left)
        wording = rng.randrange(num_wordings(problem.operation))
        yield index, problem, wording, render(problem, rng, wording)


def _extra_info(problem: Problem, split: str, index: int) -> dict[str, Any]:
    return {
        "split": split,
        "index": index,
        "operation": problem.operation,
        "left": problem.left,
        "right": problem.right,
    }
