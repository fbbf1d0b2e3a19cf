"""Runs programs that may be hostile: without network or other files, with limits, and ends all of their processes.

Linux only; uses namespaces that ordinary users may create, and needs no other program. Of this package it imports only
``process_tree``, so any code that runs a model's programs can use it:

    sandbox = Sandbox(Limits(wall_s=5))
    with sandbox.start([sandbox.python, "-S", "main.py"], files={"main.py": "print(1)"}) as process:
        result = run(process)[0]
    result.ended, result.output    # "exited", b"1\\n"

What a program sees: the system's programs and libraries and the Python that runs this, read-only; an empty directory
``/tmp`` in memory; five devices; a few environment variables. It sees no ``/proc``, no network except an unused
loopback, and no other file or process of the machine.
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

from chatlearn_sandbox import process_tree

ENTRY = str(Path(__file__).with_name("sandbox_entry.py"))
PROCESS_TREE = process_tree.__file__
START_TIMEOUT_S = 60.0
"""Time limit for building a sandbox, in seconds; it takes about 0.1 s, and longer on a busy machine."""
END_TIMEOUT_S = 10.0
"""Time limit for killed processes to end, in seconds; it takes milliseconds."""
MEMORY_PERIOD_S = 0.05
"""Time between two looks at the memory of a program's processes, in seconds."""
STDERR_BYTES = 64 << 10
"""Number of bytes of standard error to keep: its end, which the error messages quote."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # fixes the order of sets, so that a program's output is reproducible
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
Isolation = Literal["namespaces", "none"]
Ended = Literal["exited", "timed_out", "out_of_memory", "too_much_output", "stopped"]


class SandboxError(Exception):
    """This machine cannot build the sandbox, or the sandbox failed; the program is not at fault."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """The resources that one program may use."""

    wall_s: float = 10.0
    """Wall time in seconds from the start of the program; the sandbox's own start does not count."""
    cpu_s: int | None = None
    """CPU time of each process in seconds; by default the wall time, rounded up, plus one."""
    memory_bytes: int = 512 << 20
    """Address space of each process in bytes."""
    total_memory_bytes: int | None = None
    """Memory of all processes together in bytes, pages that they share counted once; by default ``memory_bytes``.

    It is measured every 0.05 s, and a program that has more is ended; the limit of each process is the kernel's.
    """
    max_processes: int = 16
    """Processes and threads at once. Applies only with namespaces; without them the kernel counts all of the user's."""
    max_open_files: int = 64
    file_bytes: int = 16 << 20
    """Of one file."""
    disk_bytes: int = 32 << 20
    """Total size of all files in bytes. Applies only with namespaces."""
    output_bytes: int = 1 << 20
    """Bytes on standard output; a program that writes more is ended."""


@dataclass(slots=True, frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    ended: Ended
    """``stopped``: the caller ended it, and the program is not at fault."""
    code: int | None
    """Exit status; -N if signal N ended it; None if the sandbox ended it."""
    output: bytes
    errors: bytes
    """The last 64 KiB of standard error."""
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0


class Sandbox:
    """Starts programs under the same limits; keeps no state, so any thread may use it.

    Args:
        isolation: ``none`` omits namespaces: the program then has the network, the user's files and rights, and as many
            processes as the user may have. Only for trusted code.
        readable: further paths that the program may read, such as a directory of packages.

    Raises:
        SandboxError: one of these paths, or Python itself, lies in ``/tmp``.
    """

    def __init__(self, limits: Limits, *, isolation: Isolation = "namespaces", readable: Sequence[str] = ()) -> None:
        self.limits = limits
        self.isolation: Isolation = isolation
        self.python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        """Path of the interpreter inside the sandbox."""
        paths = (str(Path(self.python).parent), sys.base_prefix, sys.base_exec_prefix, *readable)
        # Directories come before their content, so that nothing is mounted twice.
        self._readable = sorted({os.path.realpath(path) for path in paths}, key=len)
        hidden = [path for path in self._readable if path.startswith("/tmp/")]
        if isolation == "namespaces" and hidden:
            raise SandboxError(f"{hidden[0]} is not visible in a sandbox, which has its own /tmp; install it elsewhere")

    def check(self) -> None:
        """Run an empty program.

        Raises:
            SandboxError: this machine cannot build the sandbox; the message names what the kernel refused.
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
        """Start a program. ``run`` waits for the returned process; closing it ends the program.

        Args:
            argv: absolute path of the program, and its arguments.
            files: names and texts of files in its working directory.
            descriptor: file descriptor that the program inherits as descriptor 3.

        Raises:
            SandboxError: the process cannot be started.
        """
        return SandboxProcess(self, argv, stdin, files or {}, descriptor)

    def specification(self, argv: Sequence[str], files: Mapping[str, str], directory: str) -> bytes:
        """Return the specification that ``sandbox_entry.py`` reads."""
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
    """One program in its sandbox, from start to end. Only one thread may use it."""

    def __init__(
        self, sandbox: Sandbox, argv: Sequence[str], stdin: bytes, files: Mapping[str, str], descriptor: int | None
    ) -> None:
        self._limits = sandbox.limits
        self.output = bytearray()
        self.errors = bytearray()
        self.ended: Ended = "exited"
        self.deadline = time.monotonic() + START_TIMEOUT_S
        """Time at which the program is ended; counts from the program's start as soon as that is known."""
        self._looked_at = 0.0
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
        with (
            os.fdopen(spec_write, "wb") as stream,
            suppress(BrokenPipeError),
        ):  # the status says why the sandbox did not read
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
        """Return the descriptors to poll with their events; empty once the program and all its processes have ended."""
        return {n: select.POLLOUT if name == "stdin" else select.POLLIN for n, (name, _) in self._open.items()}

    def advance(self, descriptor: int) -> None:
        """Read or write at a descriptor that is ready."""
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

    def check_memory(self, now: float) -> None:
        """End the program if its processes have more memory together than they may; looks only once in a period."""
        if self._started and self._control >= 0 and now >= self._looked_at + MEMORY_PERIOD_S:
            self._looked_at = now
            total = self._limits.total_memory_bytes
            limit = self._limits.memory_bytes if total is None else total
            if process_tree.memory_bytes(self._launcher.pid, limit) > limit:
                self.end("out_of_memory")

    def end(self, why: Ended) -> None:
        """End the program and all its processes; the first reason counts."""
        if self._control >= 0:
            self.ended = why
            os.close(self._control)
            self._control = -1

    def result(self) -> SandboxResult:
        """Return how the program ended.

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
                raise SandboxError(f"the sandbox ended without a message (status {self._launcher.poll()}): {errors}")
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
        """End the program if it still runs, wait, and remove its files. A repeated call does nothing."""
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
    """Wait until ``main`` ends, then end ``helpers``. Return their results in this order.

    A program that exceeds its wall time, its output limit or the memory of all its processes is ended.

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
            elif process.waiting_for:
                process.check_memory(now)
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
        until = ending_by or now + MEMORY_PERIOD_S
        left = min(until, *(p.deadline for p in processes if p.ended == "exited"), now + 1) - now
        for descriptor, _ in poll.poll(max(1.0, left * 1000)):
            owners[descriptor].advance(descriptor)
    return [process.result() for process in processes]
