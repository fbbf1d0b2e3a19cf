"""Keys of parsed answers: answers that are equal by elementary algebra get one key, in bounded time.

Only the workers of reward ``math`` import this, because it imports sympy.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import sympy

MAX_OPERATIONS = 60
"""Expressions with more operations are compared by their spelling: to expand them could take long."""
MAX_EXPONENT = 8
DIGITS = 12
"""Significant digits of an irrational number's key."""
SMALL_PARTS = (
    sympy.Add,
    sympy.Mul,
    sympy.Number,
    sympy.NumberSymbol,
    sympy.Symbol,
    sympy.UnevaluatedExpr,  # a percentage
)
SYMPY_ERRORS = (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError)
"""What sympy raises for expressions that it cannot evaluate."""


def expression_key(expression: Any) -> str | None:
    """The key of a parsed answer: a number by its value, ``x = value`` by the value, a polynomial or fraction expanded,
    a set in any order, an interval, tuple or matrix by its parts. None if it is too large, or none of these.
    """
    try:
        return _key(expression)
    except SYMPY_ERRORS:
        return None


def _key(expression: Any) -> str | None:
    if isinstance(expression, sympy.Equality) and isinstance(expression.lhs, sympy.Symbol):
        return _key(expression.rhs)
    if isinstance(expression, sympy.Interval):
        opening, closing = "(" if expression.left_open else "[", ")" if expression.right_open else "]"
        return _joined((expression.start, expression.end), opening, closing)
    if isinstance(expression, sympy.FiniteSet):
        return _joined(expression.args, "{", "}", ordered=False)
    if isinstance(expression, sympy.Tuple):
        return _joined(expression.args, "(", ")")
    if isinstance(expression, sympy.MatrixBase):
        return _joined(expression, f"{expression.rows} x {expression.cols}: ", "")
    return _number_key(expression) or _algebraic_key(expression)


def _joined(parts: Any, opening: str, closing: str, *, ordered: bool = True) -> str | None:
    """The keys of all parts; None if one has no key, or if there is no part."""
    keys = [key for part in parts if (key := _key(part)) is not None]
    if not keys or len(keys) < len(parts):
        return None
    return opening + ", ".join(keys if ordered else sorted(set(keys))) + closing


def _number_key(expression: Any) -> str | None:
    """A rational number or a decimal as a fraction."""
    if not (getattr(expression, "is_Rational", False) or getattr(expression, "is_Float", False)):
        return None
    written = str(expression)
    return written if "e" in written else str(Fraction(written))  # a large exponent would take time


def _algebraic_key(expression: Any) -> str | None:
    """Sums, products and small powers: the value of those without a symbol, the others expanded."""
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    if not isinstance(expression, sympy.Expr) or not _is_small(expression):
        return None
    expanded = sympy.expand(sympy.nsimplify(expression.doit(), rational=True))
    if expanded.free_symbols or not expanded.is_number:
        return str(sympy.cancel(expanded)) if expanded.is_rational_function() else str(expanded)
    return _number_key(expanded) or str(expanded.evalf(DIGITS))


def _is_small(expression: Any) -> bool:
    """Whether it has few operations and only sums, products, roots and small powers of symbols and numbers."""
    if expression.count_ops() > MAX_OPERATIONS:
        return False
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, sympy.Pow):
            if not (part.exp.is_Rational and abs(part.exp) <= MAX_EXPONENT):
                return False
        elif not isinstance(part, SMALL_PARTS):
            return False
    return True
