"""Runs a program that may be hostile: no network, no file but its own, limits on all that it uses, and nothing left.

Linux only; uses namespaces that an ordinary user may make, and needs no other program. Imports nothing of this package
but the end of processes, so that anything that runs a model's code can use it:

    sandbox = Sandbox(Limits(wall_s=5))
    with sandbox.start([sandbox.python, "-S", "main.py"], files={"main.py": "print(1)"}) as process:
        result = run(process)[0]
    result.ended, result.output    # "exited", b"1\\n"

What a program sees: the system's programs and libraries and the Python that runs this, read-only; an empty directory
``/tmp`` in memory; five devices; an environment of a few variables; no ``/proc``; no network but an idle loopback. What
it does not see: any other file or process of the machine.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ENTRY = str(Path(__file__).with_name("sandbox_entry.py"))
PROCESS_TREE = str(Path(__file__).with_name("process_tree.py"))
START_TIMEOUT_S = 60.0
"""For the sandbox to be built; it takes a tenth of a second, and longer on a machine that is busy."""
END_TIMEOUT_S = 10.0
"""For the kernel to end what was killed; it takes milliseconds."""
STDERR_BYTES = 64 << 10
"""More is read and dropped: error messages are for people."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets in the same order, so that the same program prints the same
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
Isolation = Literal["namespaces", "none"]
Ended = Literal["exited", "timed_out", "too_much_output", "stopped"]


class SandboxError(Exception):
    """The sandbox cannot be built on this machine, or failed by itself: never the fault of the program."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    """From the start of the program; the sandbox's own start does not count."""
    cpu_s: int | None = None
    """Of each process; by default as the wall time, rounded up, and one more."""
    memory_bytes: int = 512 << 20
    """Address space of each process."""
    max_processes: int = 16
    """Processes and threads at a time. Only with namespaces: otherwise the kernel counts all of the user's."""
    max_open_files: int = 64
    file_bytes: int = 16 << 20
    """Of one file."""
    disk_bytes: int = 32 << 20
    """Of all files together. Only with namespaces."""
    output_bytes: int = 1 << 20
    """On standard output; one that writes more is ended."""


@dataclass(slots=True, frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    ended: Ended
    """``stopped``: ended by the caller, for no fault of its own."""
    code: int | None
    """Exit status; -N if signal N ended it; None if it was ended from outside."""
    output: bytes
    errors: bytes
    """The last 64 KiB of standard error."""
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


class Sandbox:
    """Starts programs under the same limits; keeps no state, so any thread may use it.

    Args:
        isolation: ``none`` leaves out all that takes namespaces: the program then has the network, the user's files and
            rights, and as many processes as the user may have. For code that is trusted.
        readable: further paths that the program may read, such as a directory of packages.

    Raises:
        SandboxError: one of these paths, or Python itself, lies in ``/tmp``.
    """

    def __init__(self, limits: Limits, *, isolation: Isolation = "namespaces", readable: Sequence[str] = ()) -> None:
        self.limits = limits
        self.isolation: Isolation = isolation
        self.python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        """The interpreter that programs find inside."""
        paths = (str(Path(self.python).parent), sys.base_prefix, sys.base_exec_prefix, *readable)
        # A directory before what it holds: what is there already is not mounted again.
        self._readable = sorted({os.path.realpath(path) for path in paths}, key=len)
        hidden = [path for path in self._readable if path.startswith("/tmp/")]
        if isolation == "namespaces" and hidden:
            raise SandboxError(
                f"{hidden[0]} cannot be shown in a sandbox, whose own /tmp hides it; install it elsewhere"
            )

    def check(self) -> None:
        """Run an empty program.

        Raises:
            SandboxError: this machine cannot build the sandbox; says what the kernel refused.
        """
        if sys.platform != "linux":
            raise SandboxError(f"a sandbox needs Linux; this is {sys.platform}")
        with self.start([self.python, "-S", "-c", "print('ready')"]) as process:
            [result] = run(process)
        if result.output != b"ready\n":
            errors = result.errors.decode(errors="replace").strip()
            raise SandboxError(f"an empty program did not run in the sandbox ({result.ended}, {result.code}): {errors}")

    def start(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, str] | None = None,
        descriptor: int | None = None,
    ) -> SandboxProcess:
        """Start a program; ``run`` waits for it, and closing what is returned ends it.

        Args:
            argv: absolute path of the program, and its arguments.
            files: name and text of files in its working directory.
            descriptor: one that the program finds as descriptor 3.

        Raises:
            SandboxError: no process can be started.
        """
        return SandboxProcess(self, argv, stdin, files or {}, descriptor)

    def specification(self, argv: Sequence[str], files: Mapping[str, str], directory: str) -> bytes:
        """What ``sandbox_entry.py`` reads."""
        limits = self.limits
        content: dict[str, Any] = {
            "argv": list(argv),
            "files": dict(files),
            "directory": directory,
            "environment": {**ENVIRONMENT, "HOME": directory, "TMPDIR": directory},
            "namespaces": self.isolation == "namespaces",
            "readable": self._readable,
            "process_tree": PROCESS_TREE,
            "cpu_s": int(limits.wall_s) + 2 if limits.cpu_s is None else limits.cpu_s,
        }
        for name in ("memory_bytes", "max_processes", "max_open_files", "file_bytes", "disk_bytes"):
            content[name] = getattr(limits, name)
        return json.dumps(content).encode()


class SandboxProcess:
    """One program in its sandbox, from start to end. Used by one thread."""

    def __init__(
        self, sandbox: Sandbox, argv: Sequence[str], stdin: bytes, files: Mapping[str, str], descriptor: int | None
    ) -> None:
        self._limits = sandbox.limits
        self.output = bytearray()
        self.errors = bytearray()
        self.ended: Ended = "exited"
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """When it is ended: counted from the program's start, once that is known."""
        self._stdin = memoryview(stdin)
        self._report = bytearray()
        self._started = False
        self._isolated = sandbox.isolation == "namespaces"
        self._directory = None if self._isolated else tempfile.mkdtemp(prefix="chatlearn-sandbox-")
        specification = sandbox.specification(argv, files, self._directory or "/tmp")
        spec_read, spec_write = os.pipe()
        status_read, status_write = os.pipe()
        control_read, self._control = os.pipe()
        self._status = status_read
        given = [spec_read, status_write, control_read, *([] if descriptor is None else [descriptor])]
        try:
            self._launcher = subprocess.Popen(
                [sandbox.python, "-I", "-S", ENTRY, *map(str, given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=given,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            for opened in (spec_write, status_read, self._control):
                os.close(opened)
            self._remove_directory()
            raise SandboxError(f"no process can be started: {error}") from error
        finally:
            for opened in (spec_read, status_write, control_read):
                os.close(opened)
        with os.fdopen(spec_write, "wb") as stream, suppress(BrokenPipeError):  # its status says why it did not read
            stream.write(specification)
        streams = self._launcher.stdin, self._launcher.stdout, self._launcher.stderr
        self._open: dict[int, Any] = {}
        for name, pipe in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            assert pipe is not None, "each is a pipe"
            os.set_blocking(pipe.fileno(), False)
            self._open[pipe.fileno()] = (name, pipe)
        os.set_blocking(status_read, False)
        self._open[status_read] = ("status", None)
        if not stdin:
            self._close_stream(self._number("stdin"))

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting_for(self) -> dict[int, int]:
        """Descriptors to poll, and for what; empty once the program and all that it started has ended."""
        return {n: select.POLLOUT if name == "stdin" else select.POLLIN for n, (name, _) in self._open.items()}

    def advance(self, descriptor: int) -> None:
        """Read or write what is ready at one of the descriptors."""
        name = self._open[descriptor][0]
        try:
            if name == "stdin":
                self._stdin = self._stdin[os.write(descriptor, self._stdin[: 1 << 16]) :]
                if not self._stdin:
                    self._close_stream(descriptor)
                return
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        except OSError:  # the program closed its standard input
            data = b""
        if not data:
            self._close_stream(descriptor)
        elif name == "status":
            self._report += data
            if not self._started and b"\n" in self._report:
                self._started = True
                self.deadline = time.monotonic() + self._limits.wall_s
        elif name == "stdout":
            self.output += data
            if len(self.output) > self._limits.output_bytes:
                del self.output[self._limits.output_bytes :]
                self.end("too_much_output")
        else:
            self.errors += data
            del self.errors[:-STDERR_BYTES]

    def end(self, why: Ended) -> None:
        """End the program and all that it started; the first reason counts."""
        if self._control >= 0:
            self.ended = why
            os.close(self._control)
            self._control = -1

    def result(self) -> SandboxResult:
        """How it ended.

        Raises:
            SandboxError: the sandbox was not built.
        """
        lines = self._report.decode(errors="replace").splitlines()
        reports = [json.loads(line) for line in lines]
        failed = next((report["failed"] for report in reports if "failed" in report), None)
        if failed is not None:
            raise SandboxError(f"the sandbox was not built: {failed}")
        reports = [report for report in reports if "code" in report]
        if not reports:
            if not self._started and self.ended == "timed_out":
                raise SandboxError(f"the sandbox was not built within {START_TIMEOUT_S:g} s")
            if self.ended == "exited":
                errors = self.errors.decode(errors="replace").strip()
                raise SandboxError(f"the sandbox ended without a word (status {self._launcher.poll()}): {errors}")
            return SandboxResult(self.ended, None, bytes(self.output), bytes(self.errors))
        report = reports[0]
        return SandboxResult(
            self.ended,
            report["code"] if self.ended == "exited" else None,
            bytes(self.output),
            bytes(self.errors),
            report["cpu_s"],
            report["peak_memory_bytes"],
        )

    def close(self) -> None:
        """End it if it still runs, wait, and remove its files. Twice is fine."""
        self.end("stopped")
        try:
            self._launcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        for descriptor in list(self._open):
            self._close_stream(descriptor)
        self._remove_directory()

    def _number(self, wanted: str) -> int:
        return next(number for number, (name, _) in self._open.items() if name == wanted)

    def _close_stream(self, descriptor: int) -> None:
        _, stream = self._open.pop(descriptor)
        if stream is None:
            os.close(descriptor)
        else:
            with suppress(BrokenPipeError):
                stream.close()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def run(main: SandboxProcess, *helpers: SandboxProcess) -> list[SandboxResult]:
    """Wait until ``main`` ends, then end ``helpers``; results in this order.

    Each is ended at its own wall-time limit, or when it writes too much.

    Raises:
        SandboxError: a sandbox was not built.
    """
    processes = (main, *helpers)
    ending_by: float | None = None
    while any(process.waiting_for for process in processes):
        now = time.monotonic()
        for process in processes:
            if process.waiting_for and now >= process.deadline:
                process.end("timed_out")
        if not main.waiting_for:
            for process in helpers:
                process.end("stopped")
        if all(process.ended != "exited" or not process.waiting_for for process in processes):
            ending_by = ending_by or now + END_TIMEOUT_S
            if now >= ending_by:
                break  # ``close`` kills it
        owners = {descriptor: process for process in processes for descriptor in process.waiting_for}
        poll = select.poll()
        for descriptor, process in owners.items():
            poll.register(descriptor, process.waiting_for[descriptor])
        left = min(ending_by or now + 1, *(p.deadline for p in processes if p.ended == "exited"), now + 1) - now
        for descriptor, _ in poll.poll(max(1.0, left * 1000)):
            owners[descriptor].advance(descriptor)
    return [process.result() for process in processes]
