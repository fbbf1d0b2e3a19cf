"""Answers that the strict mode of reward ``math`` refuses although they are algebraically equal.

A policy that is trained against a grader finds the grader's gaps. Each rule here closes one way to count as right
without stating the answer: several guesses, a chain of unequal equations, a negation, another unit, digits that only a
lenient parser joins. The rules only refuse; none accepts an answer that math-verify refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from sympy import Basic, FiniteSet, Interval, Tuple
from sympy.core.expr import Expr

from chatlearn_rewards.final_answer import CONTEXT_CHARACTERS

RELATIVE_TOLERANCE = 1e-5
"""Tolerance of numbers that count as equal. math-verify compares six decimals, so all tiny numbers are equal to it."""

NEGATION = (
    r"(?:\b(?:not|never|neither|nor|cannot|wrong|incorrect|false|anything but|other than|less than|more than|"
    r"fewer than|greater than)\b|n't\b|\\neq?(?![A-Za-z])|\\not(?![A-Za-z])|≠)"
)
NEGATED_END = re.compile(rf"{NEGATION}[\s$(\\\[*:]*$", re.IGNORECASE)
NEGATED = re.compile(NEGATION, re.IGNORECASE)
STATES = re.compile(r"\b(?:is|are|was|were|equals?|be)\b|[=:]", re.IGNORECASE)
"""Verbs between a negation and a value, which show that something else is negated ("those who did not pass are 12")."""
FALSE_THAT = re.compile(r"\b(?:false|untrue|not true|wrong|incorrect) that\b[^.!?\n]*$", re.IGNORECASE)
DENIED = re.compile(r"[\s$.]*(?:is|are|was|were)(?:\s+(?:not|never|wrong|incorrect|false)\b|n't\b)", re.IGNORECASE)
VALUE = r"(?:[-+−]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?%?)"
HAS_VALUE = re.compile(r"\d|\$[^$]|\\\(")
SEPARATOR = r"\s*(?:,\s*(?:and|or)?|;|\bor\b|\band\b)\s*"
GUESSES = re.compile(rf"{VALUE}(?:{SEPARATOR}{VALUE})+(?=[\s.!?)*]*$)")
PHRASE = re.compile(r"\banswers?\b(?:\s+(?:is|are))?\s*:?", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
CLAUSE_END = re.compile(r"[,;:]\s|(?<!anything )\bbut\b", re.IGNORECASE)
EQUALS = re.compile(
    r"(?<![<>!:\\])=|\\(?:approx|equiv|simeq|cong|to|implies|Rightarrow|rightarrow|iff)(?![A-Za-z])|≈|⇒|→"
)
SPACED_DIGITS = re.compile(r"\d\s+\d")
BARE_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:/\d+)?")
LIST_WORD = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})+(?!\d)")
WRAPPED_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathit|mathbf|operatorname|mbox|hbox)\s*\{([^{}]*)\}")
UNIT_NAMES = {
    "mm": "millimeters? millimetres?", "cm": "centimeters? centimetres?", "m": "meters? metres?",
    "km": "kilometers? kilometres?", "in": "inch inches", "ft": "foot feet", "yd": "yds yards?", "mi": "miles?",
    "mg": "milligrams?", "g": "grams?", "kg": "kilograms? kgs", "oz": "ounces?", "lb": "lbs pounds?",
    "t": "tons? tonnes?",
    "ms": "milliseconds?", "s": "secs? seconds?", "min": "mins? minutes?", "h": "hrs? hours?", "day": "days",
    "week": "weeks", "month": "months", "year": "years", "l": "liters? litres?", "ml": "milliliters? millilitres?",
    "gal": "gallons?", "mph": "", "dollar": "dollars", "euro": "euros", "cent": "cents", "degree": "degrees",
    "rad": "radians?", "%": "percent",
}  # fmt: skip
"""Canonical name of a unit -> other ways to write it, as patterns."""
UNIT_OF = re.compile(
    r"(?<![A-Za-z\\])(?P<before>square|sq|cubic|cu)?\.?\s*(?:"
    + "|".join(
        f"(?P<u{index}>{'|'.join([re.escape(name), *others.split()])})"
        for index, (name, others) in enumerate(UNIT_NAMES.items())
    )
    + r")(?![A-Za-z])\.?\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?\s*$",
    re.IGNORECASE,
)
UNITS = tuple(UNIT_NAMES)
SYMBOLS = frozenset(unit + power for unit in UNITS for power in ("", "^2", "^3"))
TRAILING_TEXT = re.compile(r"[\d})]\s*\\(?:text|textrm|mathrm|textbf|mbox)\s*\{([^{}\d]*)\}[\s.]*$")
BASE = re.compile(r"[\dA-Fa-f]_\{?(\d+)\}?[\s.]*$")


def objection_to_context(before: str) -> str | None:
    """Return why the text right before the answer negates it (``the answer is not``), or None."""
    return "it is negated" if NEGATED_END.search(before) else None


def objection_to_statement(text: str, gold: str, equals: Callable[[str], bool]) -> str | None:
    """Return why the last statement of a completion without a marked answer has no single answer, or None.

    Args:
        text: the end of the completion.
        gold: in plain LaTeX.
        equals: whether the last expression of a piece of text equals ``gold``.
    """
    statement = _last_statement(text)
    if statement is None:
        return None
    if FALSE_THAT.search(text[: text.rfind(statement)][-CONTEXT_CHARACTERS:]):
        return "it is said to be false"
    guesses = GUESSES.search(statement)
    if guesses and len(re.findall(VALUE, guesses[0])) not in _element_counts(gold):
        return "it lists several values"
    clauses = [clause for clause in CLAUSE_END.split(statement) if HAS_VALUE.search(clause)]
    meant = [clause for clause in clauses if equals(clause)] or clauses[-1:]
    if not NEGATED.search(gold) and meant and all(_denies(clause) for clause in meant):
        return "it is negated"
    return _unequal_numbers(statement)


def objection_to_answer(answer: str, gold: str, parse: Callable[[str], Sequence[Any]]) -> str | None:
    """Return why an answer that is algebraically equal to ``gold`` is refused, or None.

    Args:
        answer: in plain LaTeX.
        gold: in plain LaTeX.
        parse: math-verify's parser of answers.
    """
    if NEGATED.search(answer) and not NEGATED.search(gold):
        return "it is negated"
    if SPACED_DIGITS.search(answer) and not SPACED_DIGITS.search(gold):
        return "it has digits side by side"
    if "\\pm" not in answer + gold and "\\mp" not in answer + gold and "\\begin" not in gold:
        if not _element_counts(answer) & _element_counts(gold):
            return "it has another number of elements"
        if answer.lstrip().startswith("\\{") and gold.lstrip().startswith("("):
            return "it is a set where an ordered tuple is right"
    unit, gold_unit = _unit(answer), _unit(gold)
    if unit is not None and gold_unit is not None and _differ(unit, gold_unit):
        return f"its unit is {unit}, not {gold_unit}"
    bases = BASE.search(answer), BASE.search(gold)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return f"it is in base {bases[0][1]}, not {bases[1][1]}"
    reason = _unequal_numbers(answer)
    if reason is not None:
        return reason
    values = parse(gold), parse(answer)
    return None if _close(*values) else "it is another number"


def _denies(clause: str) -> bool:
    """Whether a clause negates its last value: a negation stands right before or after it."""
    values = list(re.finditer(VALUE, clause))
    if not values:
        return bool(NEGATED.search(clause))
    before, after = clause[: values[-1].start()], clause[values[-1].end() :]
    negations = list(NEGATED.finditer(before))
    negated = bool(negations) and not STATES.search(before, negations[-1].end())
    return negated or bool(DENIED.match(after)) or bool(FALSE_THAT.search(before))


def _last_statement(text: str) -> str | None:
    """Return the text after the last "answer is", or the last sentence with a value."""
    phrases = list(PHRASE.finditer(text))
    if phrases:
        after = text[phrases[-1].end() :].strip()
        first = SENTENCE_END.split(after, maxsplit=1)[0]
        if HAS_VALUE.search(first):
            return first
    for sentence in reversed(SENTENCE_END.split(text)):
        if HAS_VALUE.search(sentence):
            return sentence
    return None


def _unequal_numbers(text: str) -> str | None:
    """Return why a chain of equations is wrong, or None: bare numbers must be equal up to their shown rounding."""
    parts = [part.strip().strip("$").strip() for part in EQUALS.split(text)]
    if len(parts) < 2:
        return None
    numbers = [number for part in parts if (number := BARE_NUMBER.fullmatch(part.rstrip(".")))]
    for left, right in pairwise(numbers):
        if abs(Fraction(left[0]) - Fraction(right[0])) > max(_rounding(left[0]), _rounding(right[0])):
            return f"it says that {left[0]} equals {right[0]}"
    return None


def _rounding(number: str) -> Fraction:
    """Return half of the last shown decimal; integers and fractions are exact."""
    _, point, decimals = number.partition(".")
    return Fraction(1, 2 * 10 ** len(decimals)) if point else Fraction(0)


def _element_counts(answer: str) -> set[int]:
    """Return the possible numbers of values in an answer: elements of a set or bare list; ``(a, b)`` is two or one."""
    text = THOUSANDS.sub("0", LIST_WORD.sub(",", answer)).strip().rstrip(".")
    if text.startswith("\\{") and text.endswith("\\}"):
        return {_num_elements(text[2:-2])}
    counts = {_num_elements(text)}
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_end(text):
        counts.add(_num_elements(text[1:-1]))
    return counts


def _num_elements(text: str) -> int:
    """Count the elements that top-level commas and semicolons separate."""
    depth = 0
    elements = [""]
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        if token in ("{", "(", "[", r"\{"):
            depth += 1
        elif token in ("}", ")", "]", r"\}"):
            depth -= 1
        if token in (",", ";") and depth <= 0:
            elements.append("")
        else:
            elements[-1] += token
    return sum(bool(element.strip()) for element in elements)


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens ``text`` is the one that closes it."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return position == len(text) - 1
    return False


def _unit(answer: str) -> str | None:
    """Return the unit at the end of an answer, such as ``cm^2`` or ``apple``; None if there is none.

    Units with a symbol are recognised however they are written; other words only inside ``\\text{}`` and the like,
    since bare letters may be variables.
    """
    if "\\$" in answer:
        return "dollar"
    text = WRAPPED_TEXT.sub(r" \1 ", answer.replace("^\\circ", " degrees")).replace("\\%", "%").rstrip(" .")
    found = UNIT_OF.search(text)
    if found is not None and re.search(r"[\d})%]\s*$", text[: found.start()] or " "):
        name = next(unit for index, unit in enumerate(UNITS) if found[f"u{index}"] is not None)
        before = (found["before"] or "").lower()
        power = found["power"] or {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}.get(before)
        return f"{name}^{power}" if power else name
    wrapped = TRAILING_TEXT.search(answer)
    return wrapped[1].strip(" .").lower() or None if wrapped else None


def _differ(left: str, right: str) -> bool:
    """Whether two units differ: symbols are compared by name; words differ if they have no word in common."""
    if left in SYMBOLS and right in SYMBOLS:
        return left != right
    return not _words(left) & _words(right)


def _words(unit: str) -> set[str]:
    return {word.removesuffix("s") or word for word in re.findall(r"[^\W\d_]+(?:/[^\W\d_]+)*|\S+", unit)}


def _close(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    """Whether both answers have equal numbers in some reading, relative to their size; True if they have no numbers."""
    compared = False
    for left in gold:
        for right in answer:
            pairs = _number_pairs(left, right)
            if pairs is None:
                continue
            compared = True
            if all(_near(*pair) for pair in pairs):
                return True
    return not compared


def _number_pairs(left: Any, right: Any) -> list[tuple[Expr, Expr]] | None:
    """Return the pairs of numbers to compare: the two values, or the sorted elements of two equal-sized containers."""
    if not (isinstance(left, Basic) and isinstance(right, Basic)):
        return None
    containers = (FiniteSet, Tuple, Interval)
    if isinstance(left, containers) and isinstance(right, containers):
        ends = [
            [value.start, value.end] if isinstance(value, Interval) else list(value.args) for value in (left, right)
        ]
        if len(ends[0]) != len(ends[1]) or not all(_is_number(value) for end in ends for value in end):
            return None
        ordered = [sorted(end, key=lambda value: float(value.evalf())) for end in ends]
        return list(zip(*ordered, strict=True))
    return [(left, right)] if _is_number(left) and _is_number(right) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number) and value.is_extended_real is not False


def _near(left: Expr, right: Expr) -> bool:
    a, b = left.doit().evalf(20), right.doit().evalf(20)
    if a == b:
        return True
    if not (a.is_finite and b.is_finite):
        return False
    percent = any(
        abs(a - b * scale) <= RELATIVE_TOLERANCE * max(abs(a), abs(b * scale)) for scale in (100, Fraction(1, 100))
    )
    return percent or bool(abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b)))
