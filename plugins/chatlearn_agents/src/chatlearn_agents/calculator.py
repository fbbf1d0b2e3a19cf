"""Tool ``calculator``: arithmetic of numbers. Expressions are parsed and walked, never executed as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chatlearn_agents.options import CalculatorOptions
from chatlearn_core.protocols import Tool, ToolError

MAX_CHARS = 500
MAX_BITS = 4096
"""Size of an integer result; without a bound ``9**9**9`` would occupy the machine."""
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil")
} | {"abs": abs, "round": round, "min": min, "max": max}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """The value of an expression: exact for integers, 12 significant digits for other numbers.

    Raises:
        ToolError: it is no arithmetic, has no value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are read")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
        value = _value(tree.body)
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression: {error.msg}") from error
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise ToolError("the expression is nested too deeply") from error
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("^ is not an operator; write ** for powers")
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, args)))
        case ast.Tuple():
            raise ToolError("a comma separates nothing here; write numbers without thousands separators")
    raise ToolError(
        f"{ast.unparse(node)!r} is not arithmetic; use numbers, + - * / // % **, parentheses, pi, e and the functions "
        + ", ".join(_FUNCTIONS)
    )


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * base.bit_length() > MAX_BITS:
        raise ToolError("the power is too large")
    return _bounded(base**exponent)


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("a number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("a number is too large")
    return value  # type: ignore[no-any-return]  # int or float


class Calculator:
    """The source of the calculator."""

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options

    def open(self) -> Sequence[Tool]:
        """See ``ToolSource``."""
        schema = {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 2 / 7."}},
            "required": ["expression"],
            "additionalProperties": False,
        }

        async def run(arguments: Mapping[str, Any]) -> str:
            return calculate(arguments["expression"])

        return [Tool(self._options.name, "Evaluates an arithmetic expression.", schema, run)]

    def close(self) -> None:
        """Nothing to release."""
