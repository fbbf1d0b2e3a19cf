"""What a runtime brings: a handle on each worker process, and a store for values that several processes read.

Everything else in this package works on these two protocols, so a runtime over another framework implements them and
starts processes that host a ``chatlearn_workers.host.WorkerHost``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol


class CallError(Exception):
    """A call got no answer from the worker; ``str`` says what the runtime knows of the reason."""


class ProcessEndedError(CallError):
    """The worker's process has ended."""


class UnreachableError(CallError):
    """The worker cannot be reached at the moment; its process may still run."""


class AnswerLostError(CallError):
    """The worker answered, and the answer was lost with the machine that held it."""


class StoredValueLostError(Exception):
    """A stored value is gone, such as with the machine that held it; ``str`` says what the runtime knows."""


class WorkerHandle(Protocol):
    """One worker process, which hosts a ``WorkerHost``.

    Calls start in the order in which they are made, at once and not when the result is awaited. Cancelling the
    awaitable ends the wait; the call itself runs on. Awaiting raises ``CallError``; what the worker's own code raises
    is an ordinary result (``rpc_result.Failure``). Arguments are pickled. An argument that is itself a reference of the
    store arrives as the value behind it; references inside other arguments arrive as they are.
    """

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call a coroutine method of the host, on the event loop of its process."""

    def call_stored(self, method: str, *arguments: Any) -> tuple[Awaitable[Any], Any]:
        """Call a coroutine method that returns two values. The first is the awaited answer. The second stays in the
        store; its reference is at hand before the call has ended, and the store keeps the value when the worker's
        process ends.
        """

    def ask(self, method: str) -> Awaitable[Any]:
        """Call a coroutine method from a thread of its own, which answers while the event loop is blocked."""

    def kill(self) -> None:
        """End the process now. Twice is fine."""


class ObjectStore(Protocol):
    """Values by reference. It is picklable; a copy in a worker reaches the same values.

    References are hashable and picklable. A value lives as long as the reference that ``put`` or ``call_stored`` gave
    to the driver.
    """

    def put(self, value: Any) -> Any:
        """Store a value; returns its reference."""

    def get(self, references: Sequence[Any], timeout_s: float) -> list[Any]:
        """The values, fetched at the same time; arrays in them are read-only, and views where possible. Blocks.

        Raises:
            TimeoutError: not all arrived in time.
            StoredValueLostError: one is gone.
        """
