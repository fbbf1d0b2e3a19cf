"""One worker as the driver sees it: calls with a timeout, errors that say who, what and where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, WorkerPlace
from chatlearn_ray.answer import Failure
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.worker import GRACE_S, WorkerFacts

_STACK_WAIT_S = 5.0
CONTROL = "control"
"""A concurrency group with a thread of its own: it answers while the worker's event loop is blocked."""
PEERS_S = 10.0
"""When one rank failed: how long to wait for what the others say. A death is noticed after their broken connections."""


class RemoteWorker:
    """A handle on one ``WorkerHost``.

    Args:
        label: leads every message, such as ``role 'trainer', rank 1 of 2``.
        timeout_key: the setting that bounds its calls, for messages.
    """

    def __init__(self, label: str, actor: Any, timeout_s: float, timeout_key: str) -> None:
        self.name = label
        self.actor = actor
        self.timeout_s = timeout_s
        self.timeout_key = timeout_key
        self.facts: WorkerFacts | None = None

    @property
    def label(self) -> str:
        """Name, process and host, as far as they are known."""
        if self.facts is None:
            return self.name
        return f"{self.name} (process {self.facts.pid} on {self.facts.host})"

    def place(self, method: str) -> WorkerPlace:
        """Who this is, for errors."""
        role, _, worker = self.name.partition(", ")
        process, host = (self.facts.pid, self.facts.host) if self.facts is not None else (None, "")
        return WorkerPlace(role.removeprefix("role ").strip("'"), worker, method, process, host)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the worker and wait for its result.

        The worker's own limit ends first and shows the stack that hangs; this one speaks for a worker that cannot.

        Raises:
            BackendTimeoutError: no answer in time.
            WorkerDiedError: its process is gone.
            ChatLearnError: what the worker raised.
        """
        limit = (self.timeout_s if timeout_s is None else timeout_s) + GRACE_S
        return await self._answer(method, self.actor.invoke.remote(method, *args), limit)

    async def call_for_block(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Call a method that returns (facts, arrays); gives the facts and a reference to the arrays."""
        limit = (self.timeout_s if timeout_s is None else timeout_s) + GRACE_S
        facts, arrays = self.actor.invoke_with_block.options(num_returns=2).remote(method, *args)
        return await self._answer(method, facts, limit), arrays

    async def start(self, spec: Any, timeout_s: float) -> None:
        """Wait until the process is up and has built its worker."""
        await self._answer("start", self.actor.start.remote(spec), timeout_s)

    async def _answer(self, method: str, reference: Any, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                answer = await reference
        except TimeoutError:
            stack = await self.stacks()
            raise BackendTimeoutError(
                f"{self.label}, {method}: no answer within {limit_s:g} s ({self.timeout_key}). {stack}"
            ).at(self.place(method), stack) from None
        except RayActorError as error:
            raise WorkerDiedError(f"{self.label}, {method}: the process is gone: {_first_lines(error)}").at(
                self.place(method)
            ) from None
        except ObjectLostError as error:
            raise WorkerDiedError(
                f"{self.label}, {method}: its answer was lost with its node: {_first_lines(error)}"
            ).at(self.place(method)) from None
        except RayError as error:
            raise BackendError(f"{self.label}, {method}: {type(error).__name__}: {error}").at(
                self.place(method)
            ) from None
        if isinstance(answer, Failure):
            raise answer.error(self.label, method, self.place(method))
        return answer.value

    async def stacks(self) -> str:
        """Where the worker's threads are, or why that cannot be told."""
        try:
            async with asyncio.timeout(_STACK_WAIT_S):
                text = await self.actor.stacks.options(concurrency_group=CONTROL).remote()
        except TimeoutError:
            return (
                "It does not even say where it hangs: the process is stopped, or C code holds the interpreter. "
                "Look at it with py-spy"
            )
        except RayError as error:
            return f"Its stack cannot be had: {_first_lines(error)}"
        return f"It hangs here:\n{text}"

    def kill(self) -> None:
        """End the process now."""
        ray.kill(self.actor, no_restart=True)


def _first_lines(error: Exception, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count])


async def all_or_first_error(calls: Sequence[Awaitable[Any]], grace_s: float = PEERS_S) -> list[Any]:
    """Results of calls to several ranks of one group, in order.

    When one fails the others may wait for it in a collective for long: they get ``grace_s`` to say what they see, and
    are then left alone. A dead process is the cause of what its peers report, so it is named first.

    Raises:
        ChatLearnError: the most telling failure; the others are notes on it.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=grace_s)
    finally:
        for task in tasks:
            task.cancel()
    failures = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    errors = [error for error in failures if error is not None]
    if errors:
        first = min(errors, key=lambda error: not isinstance(error, WorkerDiedError))
        for other in errors:
            if other is not first:
                first.add_note(f"and: {other}")
        raise first
    return [task.result() for task in tasks]
