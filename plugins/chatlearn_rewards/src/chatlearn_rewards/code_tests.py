"""The tests of a programming task, read from a row's ground truth. Standard library only.

| ground truth (or its JSON text) | tests |
|---|---|
| ``{"inputs": [...], "outputs": [...]}``, or ``[{"input": ..., "output": ...}, ...]`` | standard input and output |
| the first one with ``"fn_name"`` | calls of this function, or of this method of ``Solution`` |
| ``["assert f(1) == 2", ...]``, or ``{"test_list": [...], "test_setup_code": ...}`` | statements (MBPP) |
| ``{"test": "def check(candidate): ...", "entry_point": "f"}`` | one test (HumanEval) |
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RULE = (
    "it must hold tests: inputs and outputs (with fn_name for calls), a list of assert statements or test_list, or "
    "test and entry_point"
)


class TestFormatError(ValueError):
    """The ground truth has no tests; the message says why and follows the word "has"."""

    __test__ = False  # no class of tests for pytest


@dataclass(slots=True, frozen=True)
class CodeTests:
    """Either ``streams`` or ``statements``."""

    streams: tuple[tuple[str, str], ...] = ()
    """Standard input, and the output expected for it."""
    statements: tuple[dict[str, Any], ...] = ()
    """``{"code"}``, or ``{"function", "arguments", "expected"}``."""
    setup: str = field(default="")
    """Run before the statements."""

    def __len__(self) -> int:
        return len(self.streams) + len(self.statements)


def read_tests(ground_truth: Any) -> CodeTests:
    """The tests of one row.

    Raises:
        TestFormatError: the ground truth has no tests.
    """
    content = ground_truth
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TestFormatError(f"the ground truth {_short(ground_truth)}, which is not JSON ({error})") from error
    content = _as_list(content)
    if isinstance(content, list):
        if content and all(isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in content):
            content = {"inputs": [item["input"] for item in content], "outputs": [item["output"] for item in content]}
        else:
            content = {"test_list": content}
    if not isinstance(content, Mapping):
        raise TestFormatError(f"the ground truth {_short(ground_truth)}, which has no tests")
    if content.get("inputs") is not None:
        return _pairs(content)
    if content.get("test_list") is not None:
        codes = _texts(content, "test_list")
        return CodeTests(statements=tuple({"code": code} for code in codes), setup=_setup(content))
    if content.get("test") is not None:
        test, name = content["test"], content.get("entry_point")
        if not isinstance(test, str) or not isinstance(name, str) or not name.isidentifier():
            raise TestFormatError(f"test {_short(test)} and entry_point {name!r}; test is code that defines check")
        return CodeTests(statements=({"code": _code(f"{test}\ncheck({name})\n", "test")},), setup=_setup(content))
    raise TestFormatError(f"a ground truth with the keys {sorted(map(str, content))}, none of which give tests")


def _pairs(content: Mapping[str, Any]) -> CodeTests:
    inputs, outputs = _as_list(content["inputs"]), _as_list(content.get("outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        sizes = [len(part) if isinstance(part, list) else type(part).__name__ for part in (inputs, outputs)]
        raise TestFormatError(f"inputs and outputs of {sizes[0]} and {sizes[1]}; both must be lists of the same length")
    name = content.get("fn_name")
    if name is None:
        for text in [*inputs, *outputs]:
            if not isinstance(text, str):
                raise TestFormatError(
                    f"the input or output {_short(text)}, which is not a text (only with fn_name may it be another"
                    " value)"
                )
        return CodeTests(streams=tuple(zip(inputs, outputs, strict=True)))
    if not isinstance(name, str) or not name.isidentifier():
        raise TestFormatError(f"fn_name {name!r}; it must be the name of a function")
    calls: list[dict[str, Any]] = []
    for arguments, expected in zip(inputs, outputs, strict=True):
        arguments = _as_list(arguments)
        if isinstance(arguments, str):
            try:
                arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
                expected = json.loads(expected) if isinstance(expected, str) else expected
            except (ValueError, RecursionError) as error:
                text = f"the input {_short(arguments)} or output {_short(expected)}, which is not JSON"
                raise TestFormatError(text) from error
        if not isinstance(arguments, list):
            raise TestFormatError(f"the input {_short(arguments)}; with fn_name it must be a list of arguments")
        calls.append({"function": name, "arguments": arguments, "expected": _plain(expected)})
    try:
        json.dumps(calls)
    except (TypeError, ValueError, RecursionError) as error:
        raise TestFormatError(f"inputs or outputs that are not JSON values ({error})") from error
    return CodeTests(statements=tuple(calls))


def _texts(content: Mapping[str, Any], key: str) -> list[str]:
    codes = _as_list(content[key])
    if not isinstance(codes, list) or not codes or not all(isinstance(code, str) for code in codes):
        raise TestFormatError(f"{key} {_short(codes)}; it must be a list of statements, at least one")
    return [_code(code, key) for code in codes]


def _setup(content: Mapping[str, Any]) -> str:
    setup = content.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise TestFormatError(f"test_setup_code {_short(setup)}, which is no text")
    return _code(setup, "test_setup_code")


def _code(text: str, key: str) -> str:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestFormatError(f"{key} {_short(text)}, which is not valid Python ({error})") from error
    return text


def _as_list(value: Any) -> Any:
    """Convert an array to a list: parquet files give lists as arrays."""
    if hasattr(value, "tolist") and not isinstance(value, list):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
