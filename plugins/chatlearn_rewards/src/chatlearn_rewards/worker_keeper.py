"""The parent process of a worker: it forks the worker, waits, and ends all processes that the worker started.

The keeper runs no user code and handles no replies. As a subreaper it inherits processes whose parents ended, and so
also finds processes that left the worker's session. It ends all of them when the worker or the pool ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

from chatlearn_rewards.pool_worker import serve
from chatlearn_sandbox.process_tree import end_descendants

REPORT = struct.Struct("!i")
"""The keeper's two reports: the worker's process id, and how it ended, as ``os.waitstatus_to_exitcode`` puts it."""
ENDED_BY_POOL = -int(signal.SIGKILL)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Keep one worker, until it ends, the pool sends SIGTERM, or the pool's process dies."""
    channel, reports, pool = (int(argument) for argument in sys.argv[1:4])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some parents ignore SIGCHLD, which would hide how children end
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(pool, signal.SIGTERM)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(reports)
        os.setsid()  # signals of the worker to its process group do not reach the keeper
        _die_with(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.path[:] = json.loads(sys.argv[4])
        serve(channel)
        os._exit(0)
    os.close(channel)
    connection = socket.socket(fileno=reports)
    with suppress(OSError):  # the pool is gone, so SIGTERM will follow
        connection.sendall(REPORT.pack(worker))
    end = _wait_for(worker)
    end_descendants(keeper)
    reaped = _reap_all()
    with suppress(OSError):
        connection.sendall(REPORT.pack(reaped.get(worker, ENDED_BY_POOL) if end is None else end))


def _wait_for(worker: int) -> int | None:
    """Return how the worker ended; None if the pool requests its end."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGCHLD:
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)  # also orphans of the worker
            if process == worker:
                return os.waitstatus_to_exitcode(status)
            if process == 0:
                break
    return None


def _reap_all() -> dict[int, int]:
    """Wait for all killed processes. Return how each ended."""
    ends: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            process, status = os.wait()
            ends[process] = os.waitstatus_to_exitcode(status)
    return ends


def _die_with(parent: int, number: signal.Signals) -> None:
    """Have Linux send a signal when the parent dies, also while a C function holds the interpreter lock."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
