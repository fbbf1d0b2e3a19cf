"""Runs the tests, in a separate sandbox, against handles of the program's objects. A script.

The program's code never runs in this process, so it can change neither the tests nor their expected values. This script
prints one line of JSON for each test: a verdict, or an error of the test itself.
"""

import builtins
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from code_wire import (  # type: ignore[import-not-found]  # a file beside this one, in the sandbox
    Link,
    LinkClosedError,
    UnsupportedValueError,
    decode,
    encode,
)

RELATIVE_TOLERANCE = 1e-9
MAX_MESSAGE = 500


class TimedOut(BaseException):
    """A test ran too long."""


class ProgramError(Exception):
    """The program raised an exception that Python does not know by name."""


class Program:
    """Calls the program in its sandbox."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def ask(self, operation: str, *operands: Any) -> Any:
        """Run an operation in the program and return its result; raises the exception that the program raised."""
        self._link.send([operation, *(encode(operand, _by_handle) for operand in operands)])
        answer = self._link.receive()
        if not isinstance(answer, list) or len(answer) != 3:
            raise LinkClosedError("no answer")
        kind, result, changed = answer
        if kind == "raised":
            raise _exception(result, changed)
        if operation == "load":
            return [(str(name), decode(value, self.handle)) for name, value in result]
        if changed is not None:
            _change(list(operands[1:]), decode(changed, self.handle))
        return decode(result, self.handle)

    def handle(self, data: list[Any]) -> Any:
        """Return the local substitute for a value that is not plain: a module of the standard library, or a handle."""
        kind, reference = data
        if kind == "module":  # import it here: the program may have changed its copy
            if str(reference).partition(".")[0] not in sys.stdlib_module_names:
                return None
            return importlib.import_module(reference)
        if kind != "handle":
            raise ValueError(f"unknown value {kind!r}")
        return Handle(self, int(reference))


class Handle:
    """An object in the program. It equals only itself, so a program cannot pass by overriding ``==``."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_asks", (program, number))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "attribute", name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return _ask(self, "call", list(positional), named)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __len__(self) -> int:
        return int(_ask(self, "length"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "truth"))

    def __str__(self) -> str:
        return str(_ask(self, "text"))

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "iterator")
        return iter(iterator) if not isinstance(iterator, Handle) else _items(iterator)


def _items(iterator: Handle) -> Iterator[Any]:
    while True:
        try:
            item = _ask(iterator, "next")
        except StopIteration:
            return
        yield item


def _ask(handle: Handle, operation: str, *operands: Any) -> Any:
    program, _ = object.__getattribute__(handle, "_asks")
    return program.ask(operation, handle, *operands)


def _by_handle(value: Any) -> Any:
    if isinstance(value, Handle):
        return ["handle", object.__getattribute__(value, "_asks")[1]]
    raise UnsupportedValueError(
        f"a test hands the program a {type(value).__name__}; only None, numbers, strings, bytes and lists, tuples, "
        "sets and dicts of these, and what the program itself returned, can be handed over"
    )


def _exception(name: Any, message: Any) -> BaseException:
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(str(message))
    return ProgramError(f"{name}: {message}")


def _change(given: Any, changed: Any) -> None:
    """Apply the program's changes of its copies of the arguments to the arguments."""
    if type(given) is not type(changed):
        return
    if isinstance(given, list | tuple):
        for one, other in zip(given, changed, strict=False):
            _change(one, other)
        if isinstance(given, list) and not _same(given, changed):
            given[:] = changed
    elif isinstance(given, dict):
        for key in given.keys() & changed.keys():
            _change(given[key], changed[key])
        if not _same(given, changed):
            given.clear()
            given.update(changed)
    elif isinstance(given, set):
        given.clear()
        given.update(changed)
    elif isinstance(given, bytearray):
        given[:] = changed


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) and repr(one) == repr(other)


def agrees(got: Any, expected: Any) -> bool:
    """Whether a returned value is the expected JSON value: a tuple is a list, floats agree to nine digits."""
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(agrees, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        names = {key if isinstance(key, str) else json.dumps(key): value for key, value in got.items()}
        return names.keys() == expected.keys() and all(agrees(names[key], expected[key]) for key in names)
    if isinstance(got, float) or isinstance(expected, float):
        if not isinstance(got, int | float) or not isinstance(expected, int | float):
            return False
        return got == expected or math.isclose(got, expected, rel_tol=RELATIVE_TOLERANCE)
    return type(got) is type(expected) and got == expected


def main() -> None:
    """``code_tester.py``: ``tests.json`` holds the tests; prints the verdicts."""
    with open("tests.json", encoding="utf-8") as file:
        plan = json.load(file)
    verdicts = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    signal.signal(signal.SIGALRM, _time_out)
    program = Program(Link(3))
    namespace: dict[str, Any] = {"__name__": "tests"}

    def load() -> None:
        namespace.update((n, v) for n, v in program.ask("load") if not hasattr(builtins, n))

    def run(code: str) -> None:
        exec(compile(code, "tests", "exec"), namespace)

    def call(test: dict[str, Any]) -> None:
        name = test["function"]
        owner = namespace.get("Solution") if name not in namespace else None
        function = getattr(owner(), name) if owner is not None else namespace.get(name)
        if function is None:
            raise NameError(name)
        assert agrees(function(*test["arguments"]), test["expected"])

    deadline = time.monotonic() + plan["total_timeout_s"]
    loaded = _judge(load, plan["timeout_s"])
    if loaded["verdict"] == "passed":
        setup = _judge(lambda: run(plan["setup"]), plan["timeout_s"])
        if setup["verdict"] != "passed":
            loaded = setup
    for test in plan["tests"]:
        verdict = loaded
        if time.monotonic() >= deadline:
            verdict = {"verdict": "timed_out", "detail": ""}
        elif loaded["verdict"] == "passed":
            work = partial(call, test) if "function" in test else partial(run, test["code"])
            verdict = _judge(work, plan["timeout_s"])
        verdicts.write(json.dumps(verdict) + "\n")
        if verdict["verdict"] in ("timed_out", "ended"):
            loaded = verdict  # the program no longer answers
        if verdict["verdict"] != "passed" and plan["stop_at_failure"]:
            break


def _judge(work: Any, timeout_s: float) -> dict[str, str]:
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimedOut:
        return {"verdict": "timed_out", "detail": ""}
    except LinkClosedError as error:
        return {"verdict": "ended", "detail": str(error)}
    except UnsupportedValueError as error:
        return {"verdict": "bad_test", "detail": str(error)}
    except AssertionError:
        return {"verdict": "wrong_answer", "detail": ""}
    except MemoryError:
        return {"verdict": "out_of_memory", "detail": ""}
    except BaseException as error:
        return {"verdict": "raised", "detail": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}
    return {"verdict": "passed", "detail": ""}


def _time_out(*_: object) -> None:
    raise TimedOut


if __name__ == "__main__":
    main()
