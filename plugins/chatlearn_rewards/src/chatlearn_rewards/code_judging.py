"""Runs one program's tests in sandboxes, in the worker processes of reward ``code``. Standard library only."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from chatlearn_rewards.code_tests import CodeTests, read_tests
from chatlearn_rewards.pool_worker import TaskConfigError
from chatlearn_sandbox.sandbox import START_TIMEOUT_S, Limits, Sandbox, SandboxError, SandboxResult, run

Verdict = Literal[
    "passed",
    "no_code",
    "wrong_answer",
    "raised",
    "ended",
    "timed_out",
    "out_of_memory",
    "too_much_output",
]
VERDICTS: tuple[Verdict, ...] = (
    "passed",
    "no_code",
    "wrong_answer",
    "raised",
    "ended",
    "timed_out",
    "out_of_memory",
    "too_much_output",
)
"""``raised``: an exception, or an exit status other than 0. ``ended``: it ended, or was killed, before it answered."""
TESTER_MEMORY_BYTES = 1 << 30
_HERE = Path(__file__).parent
_FILES = {name: (_HERE / name).read_text() for name in ("code_wire.py", "code_program.py", "code_tester.py")}


class TestError(Exception):
    """A test is invalid; the program is not at fault."""

    __test__ = False  # no class of tests for pytest


class CodeJudge:
    """Judges programs one after the other.

    Args:
        program: runs the program for one test of standard input and output.
        called: runs the program for all tests that call its functions.
        tester: runs the tests that call the program.
        timeout_s: time limit in seconds of one test that calls the program.
        total_timeout_s: time limit in seconds of all tests of a program together; later tests count as timed out.
        stop_at_failure: skip the tests after the first failure.
        tolerance: absolute and relative tolerance of numbers on standard output.
    """

    def __init__(
        self,
        program: Sandbox,
        called: Sandbox,
        tester: Sandbox,
        *,
        timeout_s: float,
        total_timeout_s: float,
        stop_at_failure: bool,
        tolerance: float,
        packages: Sequence[str],
    ) -> None:
        self._program = program
        self._called = called
        self._tester = tester
        self._timeout_s = timeout_s
        self._total_timeout_s = total_timeout_s
        self._stop_at_failure = stop_at_failure
        self._tolerance = tolerance
        self._packages = list(packages)

    def __call__(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """``{"verdicts": [one a test], "num_tests"}``, or ``{"error"}`` where the program is not at fault."""
        tests = read_tests(payload["tests"])
        try:
            verdicts = (
                self._streams(payload["code"], tests) if tests.streams else self._statements(payload["code"], tests)
            )
        except TestError as error:
            return {"error": f"cannot run a test: {error}"}
        except SandboxError as error:
            return {"error": str(error)}
        return {"verdicts": verdicts, "num_tests": len(tests)}

    def _streams(self, code: str, tests: CodeTests) -> list[Verdict]:
        verdicts: list[Verdict] = []
        deadline = time.monotonic() + self._total_timeout_s
        prologue = f"import sys; sys.path[1:1] = {self._packages!r}; del sys\n" if self._packages else ""
        for given, expected in tests.streams:
            if time.monotonic() >= deadline:
                verdicts.append("timed_out")
                continue
            command = [self._program.python, "-s", "-S", "solution.py"]
            stdin = given.encode("utf-8", "surrogatepass")
            with self._program.start(command, stdin=stdin, files={"solution.py": prologue + code}) as process:
                [result] = run(process)
            verdicts.append(self._stream_verdict(result, expected))
            if verdicts[-1] != "passed" and self._stop_at_failure:
                break
        return verdicts

    def _stream_verdict(self, result: SandboxResult, expected: str) -> Verdict:
        if (limit := _limit(result)) is not None:
            return limit
        if result.code is not None and result.code < 0:
            return "ended"
        if result.code != 0:
            return "raised"
        output = result.output.decode("utf-8", "replace")
        return "passed" if same_output(output, expected, self._tolerance) else "wrong_answer"

    def _statements(self, code: str, tests: CodeTests) -> list[Verdict]:
        plan = {
            "setup": tests.setup,
            "tests": list(tests.statements),
            "timeout_s": self._timeout_s,
            "total_timeout_s": self._total_timeout_s,
            "stop_at_failure": self._stop_at_failure,
        }
        wire = {"code_wire.py": _FILES["code_wire.py"]}
        ends = socket.socketpair()
        try:
            tester = self._tester.start(
                [self._tester.python, "-s", "-S", "code_tester.py"],
                files={**wire, "code_tester.py": _FILES["code_tester.py"], "tests.json": json.dumps(plan)},
                descriptor=ends[0].fileno(),
            )
            with tester:
                program = self._called.start(
                    [self._called.python, "-s", "-S", "code_program.py", *self._packages],
                    files={**wire, "code_program.py": _FILES["code_program.py"], "solution.py": code},
                    descriptor=ends[1].fileno(),
                )
                for end in ends:
                    end.close()
                with program:
                    tested, programs = run(tester, program)
        finally:
            for end in ends:
                end.close()
        lines = [json.loads(line) for line in tested.output.decode().splitlines(keepends=True) if line.endswith("\n")]
        faulty = next((line["detail"] for line in lines if line["verdict"] == "bad_test"), None)
        if faulty is not None:
            raise TestError(faulty)
        if tested.ended == "exited" and tested.code != 0:
            raise TestError(
                f"the tests' process ended ({tested.code}): {tested.errors.decode(errors='replace')[-500:]}"
            )
        if tested.ended == "too_much_output":
            raise TestError("there are too many tests")
        limit = _limit(programs)
        verdicts: list[Verdict] = [
            limit if line["verdict"] == "ended" and limit is not None else line["verdict"] for line in lines
        ]
        if tested.ended == "timed_out":
            verdicts += ["timed_out"] * (len(tests) - len(verdicts))
        return verdicts


def _limit(result: SandboxResult) -> Verdict | None:
    """Return the limit that ended a program."""
    if result.ended == "timed_out" or result.code == -24:  # SIGXCPU
        return "timed_out"
    if result.ended in ("too_much_output", "out_of_memory"):
        return result.ended
    last = result.errors.rstrip().rpartition(b"\n")[2]
    return "out_of_memory" if result.code == 1 and last.startswith(b"MemoryError") else None


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs agree: line by line without spaces at the ends, blank lines at the end left out.

    Words that are numbers may differ by the tolerance, absolute or relative.
    """
    lines, wanted = (
        [line.strip() for line in text.replace("\r\n", "\n").rstrip().split("\n")] for text in (output, expected)
    )
    if lines == wanted or tolerance == 0:
        return lines == wanted
    words, wanted_words = [line.split() for line in lines], [line.split() for line in wanted]
    return [len(line) for line in words] == [len(line) for line in wanted_words] and all(
        _near(one, other, tolerance)
        for line, wanted_line in zip(words, wanted_words, strict=True)
        for one, other in zip(line, wanted_line, strict=True)
    )


def _near(one: str, other: str, tolerance: float) -> bool:
    if one == other:
        return True
    try:
        got, wanted = float(one), float(other)
    except ValueError:
        return False
    return abs(got - wanted) <= tolerance * max(1.0, abs(wanted))


def build_code_judge(
    limits: Mapping[str, Any],
    isolation: Literal["namespaces", "none"],
    packages: Sequence[str],
    **settings: Any,
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function of ``{"code", "tests"}``; refuses a machine that cannot build the sandbox."""
    total_s = settings["total_timeout_s"]
    # The tests limit each call themselves; the sandbox's own limit is a little longer than all of them.
    longer = {**limits, "wall_s": total_s + START_TIMEOUT_S}
    tests = Limits(wall_s=total_s + START_TIMEOUT_S / 2, memory_bytes=TESTER_MEMORY_BYTES)
    try:
        program = Sandbox(Limits(**limits), isolation=isolation, readable=packages)
        called = Sandbox(Limits(**longer), isolation=isolation, readable=packages)
        tester = Sandbox(tests, isolation=isolation)
        program.check()
    except SandboxError as error:
        raise TaskConfigError(
            f"this machine cannot run code in a sandbox: {error}. Let users make namespaces "
            "(sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
            "kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile), or, for code that is "
            "trusted, set isolation: none"
        ) from error
    return CodeJudge(program, called, tester, packages=packages, **settings)
