"""Rewrites answers in plain LaTeX: unicode characters, colours, thin spaces and repeating decimals.

``in_plain_latex`` is applied to both sides of a comparison before they are parsed. It never changes a value, only the
notation, to what math-verify's grammar expects.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-",
    "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∞": r"\infty ", "∅": r"\emptyset ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "φ": r"\phi ", "λ": r"\lambda ",
    "°": r"^\circ ", "º": r"^\circ ", "⁄": "/", "∕": "/", "\u00a0": r"\ ",
    "\u2009": r"\,", "\u202f": r"\,", "\u2006": r"\,", "\u200a": r"\,",
    "\u200b": "", "\u2060": "", "\ufeff": "", "\u00ad": "",
}  # fmt: skip
"""Characters that LaTeX writes as commands, dashes that mean a minus, and spaces by their width."""
RADICAL = re.compile(r"√\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\w+))")
COLOUR = re.compile(r"\\(?:color|colorbox|textcolor|cellcolor)\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}")
LAYOUT = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|boldmath|boldsymbol|bm|bf|rm|it|sf|Large|large|small)(?![A-Za-z])"
)
THIN = r"(?:\\[,!;: ]|\{,\}|,\\!)"
GROUPED_THOUSANDS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{THIN}+\d{{3}})+(?!\d)")
WIDE_SPACE = re.compile(r"\\q?quad(?![a-z])|(?<!\\)(?:\\[ ;:()\[\]]|[$~])")
REPEATING = re.compile(
    r"(?<![\d.])(\d{0,400})\.(\d{0,400})\\(?:overline|bar|overbar)\s*(?:\{(\d{1,400})\}|(\d))", re.ASCII
)
"""The limit of 400 digits excludes texts that are no answers; Python refuses integers of more than 4,300 digits."""
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.])")
MIXED_NUMBER = re.compile(r"(?<![\w./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w./])")
CONSTANT = r"\\(?:pi|theta|alpha|beta|gamma|delta|lambda|mu|phi|omega)(?![A-Za-z])|\\sqrt\s*\{[^{}]*\}"
GROUP = r"(?:\{[^{}]*\}|[0-9A-Za-z])"
BARE_ARGUMENT = re.compile(rf"(\\(?:[dt]?frac|sqrt)(?:\s*{GROUP})?)\s*({CONSTANT})")
"""A command as an argument without braces, such as ``\\frac\\pi4``: the parser would take its backslash alone."""
BARE_ROOT = re.compile(r"(\\sqrt\s*\[[^\[\]]*\])\s*([0-9A-Za-z])")
BARE_POWER = re.compile(rf"\^\s*(\\[dt]?frac\s*{GROUP}\s*{GROUP})")
FULL_STOP = re.compile(r"(?<=[^\s.])(?<!\\right)\s*\.\s*$")
"""A full stop at the end; after a letter it would make the parser read only part of the expression."""
EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}")
RELATION = r"(\\leq?(?:slant)?(?![A-Za-z])|\\geq?(?:slant)?(?![A-Za-z])|<|>)"
BOUND = r"([^<>=,]+?)"
CHAINED = re.compile(rf"\s*{BOUND}\s*{RELATION}\s*([A-Za-z])\s*{RELATION}\s*{BOUND}\s*")
MIRRORED = re.compile(rf"\s*{BOUND}\s*{RELATION}\s*([A-Za-z])\s*")
ONE_SIDED = re.compile(rf"\s*([A-Za-z])\s*{RELATION}\s*{BOUND}\s*")


def in_plain_latex(answer: str) -> str:
    """``answer`` in the LaTeX that the parser reads: ``½`` as ``\\frac{1}{2}``, ``1\\,234`` as ``1234``, ``3e5`` as
    ``3\\times 10^{5}``, ``0.\\overline{3}`` as ``\\frac{3}{9}``, ``\\textcolor{red}{5}`` as ``{5}``.
    """
    text = RADICAL.sub(lambda found: rf"\sqrt{{{found[1] or found[2] or found[3]}}}", answer)
    text = text.replace("√", r"\sqrt ")
    if not text.isascii():
        text = _without_unicode(text)
    text = LAYOUT.sub(" ", COLOUR.sub("", text))
    text = GROUPED_THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = WIDE_SPACE.sub(" ", text)
    text = REPEATING.sub(_repeating, text)
    text = BARE_ARGUMENT.sub(r"\1{\2}", BARE_ARGUMENT.sub(r"\1{\2}", text))
    text = BARE_POWER.sub(r"^{\1}", BARE_ROOT.sub(r"\1{\2}", text))
    text = MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return FULL_STOP.sub("", EMPTY_SET.sub(r"\\emptyset ", text)).strip()


def in_plain_prose(text: str) -> str:
    """Running text with plain digits, signs and thousands; dollars and brackets still mark formulas."""
    plain = text if text.isascii() else _without_unicode(text)
    return GROUPED_THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), plain)


def interval(answer: str) -> str | None:
    """The interval that an inequality in one variable describes: ``[0,1)`` for ``0 \\le x < 1``; None otherwise."""
    chained = CHAINED.fullmatch(answer)
    if chained:
        low, first, _, second, high = chained.groups()
        if _is_less(first) != _is_less(second):
            return None
        if not _is_less(first):
            low, first, second, high = high, second, first, low
        return f"{_bracket(first, '[', '(')}{low},{high}{_bracket(second, ']', ')')}"
    bounded = ONE_SIDED.fullmatch(answer)
    if bounded:
        return _half_line(_is_less(bounded[2]), bounded[2], bounded[3])
    mirrored = MIRRORED.fullmatch(answer)
    if mirrored:
        return _half_line(not _is_less(mirrored[2]), mirrored[2], mirrored[1])
    return None


def _half_line(is_below: bool, relation: str, bound: str) -> str:
    """All values below or above a bound."""
    if is_below:
        return rf"(-\infty,{bound}{_bracket(relation, ']', ')')}"
    return rf"{_bracket(relation, '[', '(')}{bound},\infty)"


def _is_less(relation: str) -> bool:
    return relation.startswith(("\\le", "<"))


def _bracket(relation: str, closed: str, open_: str) -> str:
    return closed if relation.startswith("\\") else open_


def _without_unicode(text: str) -> str:
    """Fractions, powers, digits of other scripts and wide forms by their compatibility decomposition."""
    out: list[str] = []
    script = ""
    for character in text:
        form, _, parts = unicodedata.decomposition(character).partition(" ")
        raised = {"<super>": "^", "<sub>": "_"}.get(form, "") if character not in SYMBOLS else ""
        if script and raised != script:
            out.append("}")
        if raised and raised != script:
            out.append(raised + "{")
        script = raised
        if character in SYMBOLS:
            out.append(SYMBOLS[character])
        elif character.isascii():
            out.append(character)
        elif raised or form == "<wide>":
            plain = "".join(chr(int(part, 16)) for part in parts.split())
            out.append(SYMBOLS.get(plain, plain))
        elif form == "<fraction>":
            value = Fraction(unicodedata.numeric(character)).limit_denominator(10)
            out.append(rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
        elif character.isdigit():
            out.append(str(unicodedata.digit(character)))
        else:
            out.append(character)
    return "".join(out) + ("}" if script else "")


def _repeating(found: re.Match[str]) -> str:
    """``a.b\\overline{c}`` as a fraction: (abc - ab) / (10^|b| (10^|c| - 1))."""
    whole, once, cycle = found[1], found[2], found[3] or found[4]
    numerator = int(whole + once + cycle) - int(whole + once or "0")
    denominator = 10 ** len(once) * (10 ** len(cycle) - 1)
    return rf"\frac{{{numerator}}}{{{denominator}}}"
