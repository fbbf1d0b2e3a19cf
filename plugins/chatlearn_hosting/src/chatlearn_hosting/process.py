"""An engine in its own process, under this or another Python interpreter, called like an object."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, HostedProcessLostError
from chatlearn_hosting.calls import Call, Calls, OnEvent
from chatlearn_hosting.engine_side.server import STACK_SIGNAL
from chatlearn_hosting.engine_side.shared_files import mapped_files
from chatlearn_hosting.engine_side.wire import Message
from chatlearn_hosting.launch import BOOTSTRAP, child_environment, package_directories
from chatlearn_hosting.link import Link
from chatlearn_hosting.process_group import end_group, live_members
from chatlearn_hosting.stack_file import StackFile
from chatlearn_hosting.watchdog import SILENCE_S, Watchdog

KEPT_LINES = 200
SHOWN_LINES = 20
SHOWN_CHARACTERS = 400
"""Longest part of one output line to show in an error."""
TERM_GRACE_S = 2.0
"""Time in seconds for the engine's processes to clean up after SIGTERM."""
END_GRACE_S = 2.0
"""Time in seconds that a process may live after it closed its connection."""
END_TIMEOUT_S = 15.0
RECORD_INTERVAL_S = 2.0
"""Interval in seconds between two records of the shared memory that a starting engine maps."""

log = logging.getLogger(__name__)


class HostedProcess:
    """One child process that builds an object from a ChatLearn package and answers calls to its methods.

    The child's interpreter needs nothing of ChatLearn: it loads the package from its directory. ``engine_side.wire``
    defines the types that can be sent. The child leads a process group. ``close``, the child's death and the death of
    this process end the whole group; so do a stopped process in the group and a child that hangs permanently
    (``Watchdog``).
    """

    def __init__(
        self,
        name: str,
        *,
        package: str,
        factory: str,
        arguments: Mapping[str, Any],
        python: str | None = None,
        environment: Mapping[str, str | None] | None = None,
        silence_s: float | None = None,
    ) -> None:
        """Store the settings; ``start`` starts the child.

        Args:
            name: name for messages, such as ``generator role 'generator' replica 0 (vllm)``.
            package: import name of the package that runs in the child; of ChatLearn it may import
                ``chatlearn_hosting.engine_side`` and itself.
            factory: ``module:attribute`` inside the package, called in the child as ``factory(**arguments)``.
            arguments: plain builtins.
            python: the child's interpreter; None uses this one.
            environment: variables to set in addition to this process's own; None unsets one.
            silence_s: seconds without answer and CPU use after which the child is killed; None uses
                ``watchdog.SILENCE_S``.
        """
        self.name = name
        self.python = python or sys.executable
        self._silence_s = silence_s
        self._watchdog: Watchdog | None = None
        self._factory = factory
        self._arguments = dict(arguments)
        self._packages = package_directories(package)
        self._environment = dict(environment or {})
        self._calls = Calls(name)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._unfinished = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._stacks: StackFile | None = None
        self._greeted = False
        self._ended = threading.Event()
        self._reaper: threading.Thread | None = None
        self._lost: str | None = None
        self._was_killed = False
        """Whether a signal or the watchdog killed the child. Then a restart may help; a child that exited would exit
        again."""
        self._shared_files: set[str] = set()
        """Shared memory files that the engine has mapped; this process removes them, because a killed
        process cannot."""
        self._closing = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the child, which is also the id of its group."""
        assert self._process is not None, "start has not run"
        return self._process.pid

    @property
    def lost(self) -> str | None:
        """What happened to the child; None while it can be called."""
        return self._lost

    def start(self, timeout_s: float) -> None:
        """Start the child and wait until it has built its object.

        Raises:
            BackendError: the child does not start; the message has its last output.
            BackendTimeoutError: the child is not ready within ``timeout_s``; the message shows what it was doing.
        """
        assert self._process is None, f"{self.name} was started before"
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        self._stacks = StackFile()
        try:
            self._process = subprocess.Popen(
                [self.python, str(BOOTSTRAP), str(theirs.fileno()), str(self._stacks)],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                pass_fds=(theirs.fileno(), self._stacks.descriptor),
                start_new_session=True,
                env=child_environment(self.python, self._packages, self._environment),
            )
        except OSError as error:
            ours.close()
            os.close(output)
            self._lost = f"its interpreter {self.python!r} cannot be run: {error}"
            raise BackendError(
                f"{self.name}: {self._lost}\n"
                "  'python' must be the path of a working interpreter that has the engine installed."
            ) from error
        finally:
            theirs.close()
            os.close(their_output)
        self._reaper = threading.Thread(target=self._reap, name=f"{self.name} reaper", daemon=True)
        self._link = Link(
            self.name,
            ours,
            output,
            on_messages=self._on_messages,
            on_output=self._on_output,
            on_end=self._on_end,
        )
        self._watchdog = Watchdog(
            self.name,
            self._process.pid,
            ping=partial(self._link.send, ("ping",)),
            give_up=self._kill_hung_child,
            silence_s=SILENCE_S if self._silence_s is None else self._silence_s,
        )
        self._reaper.start()
        try:
            self._wait_for_build(timeout_s)
            self._watchdog.expect_answers()
        except BaseException:
            self.close(grace_s=0)
            raise

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Call a method of the child's object and block until it returns.

        Raises:
            HostedCallError: the method raised.
            HostedProcessLostError: the child died or is not running.
            BackendTimeoutError: no answer within ``timeout_s``; the call was cancelled.
        """
        return self._wait(self._send(method, "call", method, args, kwargs, False), timeout_s)

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of the child's object without waiting; the call has been sent when this returns.

        Calls start in the child in the order in which they are made here. Cancelling the future has no effect on the
        child.

        Raises:
            HostedProcessLostError: the child is not running. The future gets all other errors of ``call``.
        """
        future = self._send(method, "call", method, args, {}, False).future
        assert isinstance(future, Future)
        return future

    async def acall(
        self, method: str, *args: Any, timeout_s: float | None = None, on_event: OnEvent | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the child's object. Calls made without an ``await`` between them start in order.

        Cancelling this cancels the method, if it is a coroutine.

        Args:
            method: name of the method.
            *args: plain builtins.
            timeout_s: None waits as long as the child lives.
            on_event: called on this event loop, before this returns, with every value that the method passes to its
                argument
                ``emit``; an exception in it ends the call.
            **kwargs: plain builtins.

        Raises: the errors of ``call``.
        """
        loop = asyncio.get_running_loop()
        call = self._send(method, "call", method, args, kwargs, on_event is not None, loop=loop, on_event=on_event)
        assert isinstance(call.future, asyncio.Future)
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await call.future
        except TimeoutError:
            if not limit.expired() or timeout_s is None:
                raise
            raise await asyncio.to_thread(self.timeout_error, method, timeout_s) from None
        finally:
            self._give_up(call)

    def last_output(self, lines: int = SHOWN_LINES) -> str:
        """Return the child's last output lines."""
        shown = [line[:SHOWN_CHARACTERS] for line in list(self._lines)[-lines:]]
        return "\n".join(f"  | {line}" for line in shown) or "  | (nothing)"

    def timeout_error(self, method: str, timeout_s: float) -> BackendTimeoutError:
        """Return the error of an unanswered call, with what the child is doing now and its last output."""
        stack = "unknown, because it has ended" if self._lost is not None else "unknown, because it is still starting"
        if self._lost is None and self._greeted:
            assert self._stacks is not None
            stack = self._stacks.ask(self.pid, STACK_SIGNAL) or "unknown, because it does not answer a signal"
        return BackendTimeoutError(
            f"{self.name}: {method} had no answer from process {self.pid} within {timeout_s:g} s\n"
            f"What it was doing: {stack}\nIts last output:\n{self.last_output()}"
        )

    def close(self, grace_s: float = 10.0) -> None:
        """Let the object's ``close`` run for up to ``grace_s`` seconds, then end the child and everything it started.

        Open calls fail at once. A repeated call does nothing.
        """
        with self._closing:
            if self._lost is None:
                self._lost = "it was closed"
            self._fail_calls()
            if self._process is None or self._reaper is None:
                if self._stacks is not None:
                    self._stacks.close()
                return
            if not self._ended.is_set():
                assert self._link is not None
                self._record_shared_files()
                if grace_s > 0 and self._greeted:
                    self._link.send(("stop",))
                    self._ended.wait(grace_s)
                if not self._ended.is_set():
                    end_group(self._process.pid, TERM_GRACE_S)
            self._reaper.join(END_TIMEOUT_S)
            if self._reaper.is_alive():
                log.error("%s: process %d did not end after it was killed", self.name, self._process.pid)

    def _send(
        self,
        method: str,
        kind: str,
        *content: Any,
        loop: asyncio.AbstractEventLoop | None = None,
        on_event: OnEvent | None = None,
    ) -> Call:
        if self._link is None:
            raise HostedProcessLostError(f"{self.name}: {method}: the process was not started")
        call = self._calls.add(method, loop=loop, on_event=on_event)
        try:
            self._link.send((kind, call.number, *content))
        except BaseException:
            self._calls.drop(call)
            raise
        return call

    def _wait(self, call: Call, timeout_s: float) -> Any:
        assert not isinstance(call.future, asyncio.Future)
        try:
            return call.future.result(timeout_s)
        except FutureTimeoutError:
            if call.future.done():
                raise
            raise self.timeout_error(call.method, timeout_s) from None
        finally:
            self._give_up(call)

    def _wait_for_build(self, timeout_s: float) -> None:
        """Wait until the child has built its object, and periodically record its shared memory files."""
        call = self._send("start", "build", self._factory, self._arguments)
        assert not isinstance(call.future, asyncio.Future)
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and not call.future.done():
            wait([call.future], min(left, RECORD_INTERVAL_S))
            self._record_shared_files()
        self._wait(call, max(deadline - time.monotonic(), 0.0))

    def _record_shared_files(self) -> None:
        assert self._process is not None
        self._shared_files |= mapped_files(live_members(self._process.pid))

    def _give_up(self, call: Call) -> None:
        if self._calls.drop(call) and self._lost is None and self._link is not None:
            self._link.send(("cancel", call.number))

    def _on_messages(self, messages: list[Message]) -> None:
        if messages[0][0] == "hello":
            self._greeted = True
            messages = messages[1:]
        if ("pong",) in messages:
            assert self._watchdog is not None, "it asked"
            self._watchdog.heard()
            messages = [message for message in messages if message != ("pong",)]
        self._calls.deliver(messages)

    def _on_output(self, data: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            # A progress bar rewrites its line; keep only its last state.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self._lines.append(text)
            log.debug("%s: %s", self.name, text)

    def _on_end(self) -> None:
        """Handle that the child closed its connection: it is about to end, or can no longer be reached."""
        threading.Thread(target=self._expect_end, name=f"{self.name} end", daemon=True).start()

    def _expect_end(self) -> None:
        if not self._ended.wait(END_GRACE_S):
            self._kill()

    def _kill_hung_child(self, reason: str) -> None:
        """Kill a child that has not ended but does no work, and treat it as dead."""
        if self._lost is None and self._process is not None:
            self._lost, self._was_killed = reason, True
            self._fail_calls()
            self._kill()

    def _kill(self) -> None:
        """Kill the child. ``Popen.kill`` may reap the child, which would hide its exit status from the
        reaper thread.
        """
        assert self._process is not None
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Wait for the child's end, fail open calls, and end what it left behind."""
        process, link = self._process, self._link
        assert process is not None
        # Do not reap yet, so that the process id is not reused until the group is gone.
        status = None
        with suppress(ChildProcessError):  # other code in this process has reaped it
            status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._ended.set()
        assert link is not None
        if self._watchdog is not None:
            self._watchdog.stop()
        link.stop()
        if self._unfinished:
            self._lines.append(self._unfinished.decode(errors="replace"))
        if self._lost is None:
            self._was_killed, how = _describe_end(status)
            self._lost = f"its process {process.pid} {how}"
        self._fail_calls()
        end_group(process.pid, TERM_GRACE_S, self._shared_files)
        assert self._stacks is not None
        # Before the process id can be reused: the file's reader signals the process.
        self._stacks.close()
        process.wait()

    def _fail_calls(self) -> None:
        reason, was_killed = self._lost, self._was_killed

        def error(method: str) -> HostedProcessLostError:
            said = "" if reason == "it was closed" else f"\nIts last output:\n{self.last_output()}"
            lost = HostedProcessLostError(f"{self.name}: {method} failed: {reason}{said}")
            lost.process_is_gone = was_killed
            return lost

        self._calls.fail_all(error)


def _describe_end(status: os.waitid_result | None) -> tuple[bool, str]:
    """Return whether a signal killed a process, and a description of its end. ``status`` is None if it is unknown."""
    if status is None:
        return False, "has ended, but other code in this process reaped its exit code"
    if status.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return True, f"was killed by {_signal_name(status.si_status)}"
    return False, f"exited with code {status.si_status}"


def _signal_name(number: int) -> str:
    known = number in {member.value for member in signal.Signals}
    return f"signal {number} ({signal.Signals(number).name})" if known else f"signal {number}"
