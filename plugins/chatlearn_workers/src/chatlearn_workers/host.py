"""A worker's process, which hosts the worker that its spec describes.

Imports no torch until ``start``, so that environment variables are set before torch is imported.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import psutil

from chatlearn_workers.user_code import UserCode, enter_directory


class WorkerHost:
    """One process of a role. Every call arrives through ``invoke``, on the event loop; blocking work runs in a thread.

    Args:
        environment: environment variables of this process.
        path: the driver's module path.
        directory: the driver's working directory.
        code: Python files of that directory, for machines without it.
    """

    def __init__(
        self, environment: Mapping[str, str], path: Sequence[str], directory: str, code: UserCode | None
    ) -> None:
        os.environ.update(environment)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._problem = enter_directory(directory, code)
        # Child processes (reward pools, engines) must import from the same path.
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, *_python_path()]))
        self._worker: Any = None

    def check(self) -> None:
        """Raises ChatLearnError if this process cannot host its worker."""
        from chatlearn_core.exceptions import ConfigError

        if self._problem is not None:
            raise ConfigError(self._problem)

    def node_address(self) -> str:
        """The address under which other nodes reach this one."""
        return socket.gethostbyname(socket.gethostname())

    async def start(self, spec: Any) -> Any:
        """Build the worker; returns an empty ``RpcResult``, or a ``Failure``."""
        from chatlearn_workers.rpc_result import Failure, RpcResult
        from chatlearn_workers.workers import build_worker

        try:
            self.check()
            self._worker = build_worker(spec, self.node_address)
        except (Exception, SystemExit) as error:
            return Failure.of(error)
        return RpcResult(None)

    async def invoke(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the worker; returns ``RpcResult`` or ``Failure`` and never raises."""
        from chatlearn_workers.rpc_result import Failure, RpcResult

        try:
            return RpcResult(await getattr(self._worker, method)(*args))
        except (Exception, SystemExit) as error:
            return Failure.of(error)

    async def invoke_with_block(self, method: str, *args: Any) -> tuple[Any, Any]:
        """Like ``invoke`` for a method that returns (facts, arrays), as two results: the caller need not fetch
        arrays."""
        from chatlearn_workers.rpc_result import RpcResult

        answer = await self.invoke(method, *args)
        if not isinstance(answer, RpcResult):
            return answer, None
        facts, arrays = answer.value
        return RpcResult(facts), arrays

    async def is_there(self) -> list[int]:
        """Show that the process is alive and its interpreter runs; returns the stopped processes of an engine below it.

        Processes that a user's reward or environment starts are left to that code.
        """
        is_users = self._worker is None or self._worker.spec.kind in ("reward", "environment")
        return [] if is_users else stopped_below(os.getpid())

    async def stacks(self) -> str:
        """The current stack of every thread of this process."""
        from chatlearn_workers.stacks import all_stacks

        return all_stacks()


def stopped_below(pid: int) -> list[int]:
    """Stopped (SIGSTOP) processes among the descendants of a process."""
    stopped: list[int] = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process.pid)
    return stopped


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
