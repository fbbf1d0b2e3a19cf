"""Runs the code under test inside its sandbox, and answers the tests' calls. A script.

Nothing in this process is trusted, because the code may change all of it. It can answer wrongly, or not at all, but it
never sees a test.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from code_wire import Link, decode, encode  # type: ignore[import-not-found]  # a file beside this one, in the sandbox

SOURCE = "solution.py"
MAX_MESSAGE = 500
_kept: list[Any] = []


def main() -> None:
    """Read the code, then answer calls until the tests close the connection."""
    link = Link(3)
    os.set_inheritable(3, False)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    sys.path[1:1] = sys.argv[1:]
    while True:
        request = link.receive()
        try:
            answer = _do(request, module)
        except BaseException as error:
            answer = ["raised", type(error).__name__, _message(error)]
        try:
            link.send(answer)
        except (ValueError, RecursionError) as error:
            link.send(["raised", type(error).__name__, str(error)[:MAX_MESSAGE]])


def _do(request: list[Any], module: types.ModuleType) -> list[Any]:
    operation, *operands = request
    if operation == "load":
        with open(SOURCE, encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), SOURCE, "exec"), module.__dict__)
        names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        return ["value", [[name, encode(value, _keep)] for name, value in names.items()], None]
    target, *operands = [decode(operand, lambda data: _kept[data[1]]) for operand in operands]
    if operation == "call":
        positional, named = operands
        result = encode(target(*positional, **named), _keep)
        return ["value", result, encode([positional, named], _keep)]
    answers: dict[str, Callable[[], Any]] = {
        "attribute": lambda: getattr(target, operands[0]),
        "item": lambda: target[operands[0]],
        "length": lambda: len(target),
        "iterator": lambda: iter(target),
        "next": lambda: next(target),
        "truth": lambda: bool(target),
        "text": lambda: str(target),
    }
    return ["value", encode(answers[operation](), _keep), None]


def _keep(value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return encode(value.item(), _keep)
    _kept.append(value)
    return ["handle", len(_kept) - 1]


def _message(error: BaseException) -> str:
    try:
        return str(error)[:MAX_MESSAGE]
    except BaseException:
        return ""


if __name__ == "__main__":
    main()
