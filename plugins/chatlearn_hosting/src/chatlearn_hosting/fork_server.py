"""Runs functions in processes of their own, forked from a server that has already imported what they need.

A new interpreter that imports torch and transformers takes seconds of CPU time, which is more than most tests need
afterwards. Linux only.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

_MESSAGE_BYTES = 1 << 16
_MOST_DESCRIPTORS = 32


class ForkedProcess:
    """A process that a ``ForkServer`` started.

    Args:
        pid: its process id.
        status: socket on which the server reports its exit code.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.status = status
        self.returncode: int | None = None
        """Exit code as ``subprocess`` has it, so -9 for SIGKILL; None until ``wait`` or ``poll`` has seen the end."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; returns the exit code, or None after ``timeout_s`` seconds."""
        if self.returncode is None and select.select([self.status], [], [], timeout_s)[0]:
            self.ended(self.status.recv(_MESSAGE_BYTES))
        return self.returncode

    def ended(self, content: bytes) -> int:
        """Record what was read from ``status``; nothing means that the server died, which kills its processes."""
        self.returncode = int(content) if content else -signal.SIGKILL
        self.status.close()
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL, unless the end has been seen."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A context manager; leaving it kills the processes that still run.

    Args:
        *modules: modules to import before any process is forked. They must not start threads.
        path: directories to search for modules before those of this process.
        environment: environment variables of the server, in addition to those of this process.
    """

    def __init__(self, *modules: str, path: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join([*path, *sys.path])}
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
        theirs.close()
        self._is_ready = False

    def start(self, function: str, *arguments: str, descriptors: Sequence[int] = ()) -> ForkedProcess:
        """Call ``function`` in a new process, which exits with 0 when it returns and with 1 when it raises.

        Args:
            function: ``module:name``, called with ``arguments`` and, if there are ``descriptors``, a list of their
                numbers in the new process.
            *arguments: texts.
            descriptors: open file descriptors to pass on.

        Raises:
            RuntimeError: the server has ended; its error is on stderr.
        """
        ours, theirs = socket.socketpair()
        order = json.dumps({"function": function, "arguments": arguments}).encode()
        try:
            if not self._is_ready:
                self._is_ready = bool(self._control.recv(_MESSAGE_BYTES))
            # This process's own stdout and stderr as they are now: pytest redirects them for each test.
            socket.send_fds(self._control, [order], [1, 2, theirs.fileno(), *descriptors])
            answer = self._control.recv(_MESSAGE_BYTES)
        except OSError:
            answer = b""
        finally:
            theirs.close()
        if not answer:
            ours.close()
            raise RuntimeError(f"the fork server has ended with exit code {self._process.wait()}")
        return ForkedProcess(int(answer), ours)

    def close(self) -> None:
        """End the server and its processes."""
        self._control.close()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server:
    """The server's loop: forks on request and reports exit codes, until the other end closes."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, tuple[int, socket.socket]] = {}
        """By pidfd: process id, and the socket for the exit code."""
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)

    def serve(self) -> None:
        self.control.send(b"ready")
        while True:
            for ready, _ in self.poll.poll():
                if ready != self.control.fileno():
                    self.reap(ready)
                    continue
                content, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, _MOST_DESCRIPTORS)
                if not content:
                    for pid, _ in self.children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                self.fork(json.loads(content), descriptors)

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        stdout, stderr, status, *others = descriptors
        pid = os.fork()
        if pid == 0:
            self.control.close()
            os.close(status)
            for pidfd, (_, socket_) in self.children.items():
                os.close(pidfd)
                socket_.close()
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            os.close(stdout)
            os.close(stderr)
            _call(order["function"], [*order["arguments"], *([others] if others else [])])
        for descriptor in (stdout, stderr, *others):
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = (pid, socket.socket(fileno=status))
        self.poll.register(pidfd, select.POLLIN)
        self.control.send(str(pid).encode())

    def reap(self, pidfd: int) -> None:
        self.poll.unregister(pidfd)
        pid, status = self.children.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        with suppress(BrokenPipeError), status:
            status.send(str(code).encode())


def _call(function: str, arguments: Sequence[Any]) -> None:
    """Be the new process: call the function and exit, whatever threads remain."""
    code = 1
    try:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """The server's program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or the first collection of each process would copy every page that holds an object
    _Server(control).serve()


if __name__ == "__main__":
    main()
