"""The interface that a runtime provides: a handle to each worker process, and a store for values read by several.

Everything else in this package uses only these two protocols, so a runtime over another framework implements them and
starts processes that host a ``chatlearn_workers.host.WorkerHost``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol


class CallError(Exception):
    """A call got no answer from the worker; ``str`` gives the reason that the runtime knows."""


class ProcessEndedError(CallError):
    """The worker's process has ended."""


class UnreachableError(CallError):
    """The worker is temporarily unreachable; its process may still run."""


class AnswerLostError(CallError):
    """The worker answered, but the answer was lost with the machine that held it."""


class StoredValueLostError(Exception):
    """A stored value is gone, for example with the machine that held it; ``str`` gives the known reason."""


class WorkerHandle(Protocol):
    """One worker process, which hosts a ``WorkerHost``.

    Calls start in the order in which they are made, at once rather than when awaited. Cancelling the awaitable ends the
    wait, but not the call. Awaiting raises ``CallError``; an error of the worker's own code is an ordinary result
    (``rpc_result.Failure``). Arguments are pickled. An argument that is itself a reference of the store arrives as its
    value; references inside other arguments stay references.
    """

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a coroutine method of the host, on the event loop of its process."""

    def call_stored(self, method: str, *arguments: Any) -> tuple[Awaitable[Any], Any]:
        """Call a coroutine method that returns two values. The first is the awaited answer. The second stays in the
        store; its reference is available before the call ends, and the value outlives the worker's process.
        """

    def ask(self, method: str) -> Awaitable[Any]:
        """Call a coroutine method in a separate thread, which answers even while the event loop is blocked."""

    def kill(self) -> None:
        """End the process now. Safe to call twice."""


class ObjectStore(Protocol):
    """Values by reference. The store is picklable; a copy in a worker reaches the same values.

    References are hashable and picklable. A value lives as long as the driver's reference from ``put`` or
    ``call_stored``.
    """

    def put(self, value: Any) -> Any:
        """Store a value; returns its reference."""

    def get(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values, fetched concurrently; their arrays are read-only, and views where possible. Blocks.

        Raises:
            TimeoutError: not all arrived in time.
            StoredValueLostError: a value is gone.
        """
