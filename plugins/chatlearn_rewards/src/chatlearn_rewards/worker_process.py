"""The pool's end of one worker: a process that gets one item at a time and is ended with all that it started."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from chatlearn_rewards.pool_worker import CHANNEL_LOST, FRAME, MAX_REPLY_BYTES
from chatlearn_rewards.worker_keeper import REPORT
from chatlearn_rewards.worker_output import WorkerOutput
from chatlearn_sandbox.process_tree import end_descendants, end_marked

BOOTSTRAP = "from chatlearn_rewards.worker_keeper import main; main()"
MARK_VARIABLE = "CHATLEARN_REWARD_WORKER"
"""Environment variable that marks a worker and all processes that it starts."""
TOKEN_BYTES = 16
END_TIMEOUT_S = 5.0
"""Time limit in seconds for the keeper to end all processes and report how the worker ended; it takes milliseconds."""
MAX_WAIT_S = 3600.0
"""Longest single wait in seconds: ``poll`` accepts at most a few weeks."""


class WorkerStartError(Exception):
    """A worker did not start."""

    def __init__(self, message: str, *, configuration: bool = False) -> None:
        super().__init__(message)
        self.configuration = configuration


class WorkerEndedError(Exception):
    """A worker's process is gone; the message says how it ended."""


class MalformedReplyError(Exception):
    """A worker sent something that is not a reply to its item."""


class WorkerProcess:
    """One worker and the connection to it. One thread uses it; any thread may call ``end``.

    Raises:
        WorkerStartError: no process can be started.
    """

    def __init__(self, output: WorkerOutput) -> None:
        self.ready = False
        self.used = False
        """Whether it has got an item since it became ready."""
        self.pid = 0
        """Id of the process that calls the function; known once it is ready."""
        self._output = output
        self._channel, worker_channel = socket.socketpair()
        self._reports, keeper_reports = socket.socketpair()
        given = [worker_channel.fileno(), keeper_reports.fileno()]
        self._printed, printing = os.pipe()
        self._mark = secrets.token_hex(TOKEN_BYTES)
        command = [sys.executable, "-P", "-c", BOOTSTRAP, *map(str, given), str(os.getpid()), json.dumps(sys.path)]
        try:
            self._keeper = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=printing,
                pass_fds=given,
                start_new_session=True,  # protects it from Ctrl-C
                env={"OMP_NUM_THREADS": "1", **os.environ, MARK_VARIABLE: self._mark},
            )
        except OSError as error:
            self._close_connections()
            raise WorkerStartError(f"a worker process cannot be started: {error}") from error
        finally:
            worker_channel.close()
            keeper_reports.close()
            os.close(printing)
        os.set_blocking(self._printed, False)
        self._poll = select.poll()
        for descriptor in (self._channel.fileno(), self._reports.fileno(), self._printed):
            self._poll.register(descriptor, select.POLLIN)
        self._channel.setblocking(False)

    def build(self, description: bytes, timeout_s: float) -> None:
        """Make the process build its task.

        Raises:
            WorkerStartError: it failed, or did not finish in time.
        """
        try:
            self.pid = REPORT.unpack(self._read(self._reports, REPORT.size, time.monotonic() + timeout_s))[0]
            reply = self.ask(description, timeout_s)
        except TimeoutError as error:
            raise WorkerStartError(f"a worker process was not ready after {timeout_s:g} s") from error
        except WorkerEndedError as error:
            raise WorkerStartError(f"a worker process died while starting ({error})") from error
        except MalformedReplyError as error:
            raise WorkerStartError(f"a worker process wrote to its connection while starting: {error}") from error
        if "failed" in reply:
            raise WorkerStartError(str(reply["failed"]), configuration=bool(reply.get("configuration")))
        self.ready = True

    def ask(self, payload: bytes, timeout_s: float) -> Mapping[str, Any]:
        """Send one payload and return the worker's reply.

        Raises:
            TimeoutError: no reply came in time.
            WorkerEndedError: the process is gone.
            MalformedReplyError: the worker sent something that is not a reply to this payload.
        """
        deadline = time.monotonic() + timeout_s
        token = secrets.token_bytes(TOKEN_BYTES)
        self.used = self.ready
        self._output.begin_item()
        self._write(FRAME.pack(token, len(payload)) + payload, deadline)
        answered, size = FRAME.unpack(self._read(self._channel, FRAME.size, deadline))
        if answered != token or size > MAX_REPLY_BYTES:
            raise MalformedReplyError("it does not begin like a reply to this item")
        body = self._read(self._channel, size, deadline)
        self._drain()  # forward what it printed before the reply
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise MalformedReplyError(f"it is not JSON: {error}") from error
        if not isinstance(reply, dict):
            raise MalformedReplyError(f"it is a {type(reply).__name__}, not an object")
        return reply

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        writing = self._channel.fileno()
        while left:
            try:
                left = left[self._channel.send(left) :]
                continue
            except BlockingIOError:
                pass
            except OSError as error:
                raise WorkerEndedError(self.describe_end()) from error
            self._poll.modify(writing, select.POLLOUT)
            try:
                if self._wait(deadline):
                    raise WorkerEndedError(self.describe_end())
            finally:
                self._poll.modify(writing, select.POLLIN)

    def _read(self, connection: socket.socket, size: int, deadline: float) -> bytes:
        """Read this number of bytes of a connection, and forward what the worker prints meanwhile."""
        parts = bytearray()
        while len(parts) < size:
            try:
                data = connection.recv(size - len(parts), socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._wait(deadline) and connection is self._channel and not self._has_data(connection):
                    raise WorkerEndedError(self.describe_end()) from None
                continue
            except OSError as error:
                raise WorkerEndedError(self.describe_end()) from error
            if not data:
                raise WorkerEndedError(self.describe_end())
            parts += data
        return bytes(parts)

    def _wait(self, deadline: float) -> bool:
        """Wait for data. Return whether the keeper reported. Raises: TimeoutError: the deadline passed."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        events = dict(self._poll.poll(min(remaining, MAX_WAIT_S) * 1000))
        if self._printed in events:
            self._drain()
        return self._reports.fileno() in events

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._printed, 1 << 16):
                self._output.take(data)

    @staticmethod
    def _has_data(connection: socket.socket) -> bool:
        """Whether data or the end of the connection can be read."""
        try:
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def alive(self) -> bool:
        """Whether it can take an item: it lives and has sent nothing unrequested."""
        self._drain()
        if self._has_data(self._reports) or self._has_data(self._channel):
            return False
        try:  # a killed process may be a zombie before its connection closes
            return Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    def describe_end(self) -> str:
        """Describe how the process ended."""
        self._reports.settimeout(END_TIMEOUT_S)
        try:
            code = REPORT.unpack(self._reports.recv(REPORT.size, socket.MSG_WAITALL))[0]
        except TimeoutError:
            return "it closed its connection to the pool"
        except (OSError, struct.error):
            return "its keeper process was killed"
        if code == CHANNEL_LOST:
            return "the function closed or replaced the connection to the pool, a file descriptor that it did not open"
        return f"exit status {code}" if code >= 0 else f"signal {_signal_name(-code)}"

    def end(self) -> None:
        """Make the keeper end the worker and all that it started, without waiting."""
        with suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
            self._keeper.send_signal(signal.SIGCONT)  # a process of the worker may have stopped the keeper

    def close(self) -> None:
        """End the worker, reap its processes and close the connection."""
        self.end()
        try:
            self._keeper.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_descendants(self._keeper.pid)
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.returncode != 0:  # the keeper was killed before it had ended the others
            end_marked(self._mark)
        with suppress(OSError):
            self._drain()
        self._close_connections()

    def _close_connections(self) -> None:
        self._channel.close()
        self._reports.close()
        os.close(self._printed)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return str(number)
