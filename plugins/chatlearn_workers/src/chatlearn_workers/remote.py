"""The driver's view of one worker: calls with a timeout, and errors that name worker, method and place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, RuntimeLostError, WorkerPlace
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.rpc import AnswerLostError, CallError, ProcessEndedError, UnreachableError, WorkerHandle
from chatlearn_workers.rpc_result import Failure
from chatlearn_workers.worker import GRACE_S, WorkerFacts

_STACK_WAIT_S = 5.0
LOOKS = 6
"""Checks within the time after which a silent process is killed. Checks are counted rather than seconds, so that a
worker is not blamed while the driver's own event loop is blocked."""
PATIENCE_LOOKS = 3
"""Additional checks for an engine with stopped processes; a worker that watches them itself reacts sooner."""
START_PATIENCE = 5
"""A starting worker may be silent this many times as long: loading libraries holds the interpreter's lock."""
PEERS_S = 10.0
"""Time to wait for other ranks' errors after one failed, seconds; broken connections show before a death."""

logger = logging.getLogger(__name__)


class RemoteWorker:
    """One ``WorkerHost`` behind a handle.

    The process is checked regularly, whatever else it does. A process that does not answer, such as a stopped one, is
    killed, so that calls waiting for it fail because it died.

    Args:
        label: begins every message, such as ``role 'trainer', rank 1 of 2``.
        handle: reaches the process.
        timeout_s: timeout of calls without their own, seconds.
        timeout_key: configuration key of that timeout, for messages.
        silence_s: maximum time without an answer, seconds.
        lost: done, with a sentence, when the basis of all workers (Ray itself) is gone; the handle must not be used
            afterwards.
    """

    def __init__(
        self,
        label: str,
        handle: WorkerHandle,
        timeout_s: float,
        timeout_key: str,
        silence_s: float,
        lost: asyncio.Future[str] | None = None,
    ) -> None:
        self.name = label
        self.handle = handle
        self.timeout_s = timeout_s
        self.timeout_key = timeout_key
        self.silence_s = silence_s
        self.facts: WorkerFacts | None = None
        self._lost = lost
        self._is_starting = True
        self._watch: asyncio.Task[None] | None = None
        self._silence = ""
        """The reason why it was killed, if it was silent."""

    @property
    def label(self) -> str:
        """Name, process and host, as far as known."""
        if self.facts is None:
            return self.name
        return f"{self.name} (process {self.facts.pid} on {self.facts.host})"

    def place(self, method: str) -> WorkerPlace:
        """Identifies the worker in errors."""
        role, _, worker = self.name.partition(", ")
        process, host = (self.facts.pid, self.facts.host) if self.facts is not None else (None, "")
        return WorkerPlace(role.removeprefix("role ").strip("'"), worker, method, process, host)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the worker and wait for its result.

        The worker's own timeout ends first and shows the hanging stack; this one covers a worker that cannot answer.

        Raises:
            BackendTimeoutError: no answer in time.
            WorkerDiedError: its process is gone.
            RuntimeLostError: the basis of all workers is gone.
            ChatLearnError: the worker's error.
        """
        self.check()
        limit = (self.timeout_s if timeout_s is None else timeout_s) + GRACE_S
        return await self._answer(method, self.handle.call("invoke", method, *args), limit)

    async def call_for_block(self, method: str, *args: Any, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Call a method that returns (facts, arrays); returns the facts and a reference to the arrays."""
        self.check()
        limit = (self.timeout_s if timeout_s is None else timeout_s) + GRACE_S
        facts, arrays = self.handle.call_stored("invoke_with_block", method, *args)
        return await self._answer(method, facts, limit), arrays

    async def start(self, spec: Any, timeout_s: float) -> None:
        """Wait until the process has started and built its worker; from then on it must answer checks."""
        self._watch = asyncio.create_task(self._keep_asking())
        await self._answer("start", self.handle.call("start", spec), timeout_s)
        self._is_starting = False

    async def _keep_asking(self) -> None:
        look_s, num_missed, is_up = self.silence_s / LOOKS, 0, False
        num_stopped: dict[int, int] = {}
        while self._lost is None or not self._lost.done():
            answer = asyncio.ensure_future(self._is_there())
            try:
                while not (await asyncio.wait({answer}, timeout=look_s))[0]:
                    num_missed += is_up  # a process that has not started yet cannot answer
                    if num_missed > LOOKS * (START_PATIENCE if self._is_starting else 1):
                        self._give_up(
                            f"it did not answer for {num_missed * look_s:.0f} s (runtime.options.heartbeat_timeout_s "
                            f"is {self.silence_s:g}) and was killed: it was stopped, or C code held its interpreter"
                        )
                        return
            finally:
                answer.cancel()  # nobody waits for it any more, also when this task is cancelled
            try:
                stopped = answer.result()
            except ProcessEndedError:
                return  # waiting calls get the same error
            except CallError as error:
                logger.warning("%s: cannot be asked whether it is there: %s", self.label, error)
                await asyncio.sleep(look_s)
                continue
            num_missed, is_up = 0, True
            num_stopped = {process: num_stopped.get(process, 0) + 1 for process in stopped}
            for process, looks in num_stopped.items():
                if looks > LOOKS + PATIENCE_LOOKS:
                    self._give_up(
                        f"process {process}, which it started, has been stopped (SIGSTOP) for {looks * look_s:.0f} s, "
                        "and it was killed with it"
                    )
                    return
            await asyncio.sleep(look_s)

    def _give_up(self, reason: str) -> None:
        self._silence = reason
        self.handle.kill()

    async def _is_there(self) -> list[int]:
        """Stopped processes below the worker's."""
        found: list[int] = await self.handle.ask("is_there")
        return found

    def check(self) -> None:
        """Raises RuntimeLostError if the basis of all workers is gone, because a call could then end this process."""
        if self._lost is not None and self._lost.done():
            raise RuntimeLostError(self._lost.result())

    async def _result(self, call: Awaitable[Any], limit_s: float) -> Any:
        """The answer. Raises TimeoutError, or RuntimeLostError if the basis of all workers is lost meanwhile."""
        answer = asyncio.ensure_future(call)
        lost = [] if self._lost is None else [self._lost]
        try:
            await asyncio.wait([answer, *lost], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        self.check()
        raise TimeoutError

    async def _answer(self, method: str, call: Awaitable[Any], limit_s: float) -> Any:
        try:
            answer = await self._result(call, limit_s)
        except TimeoutError:
            stack = await self.stacks()
            raise BackendTimeoutError(
                f"{self.label}, {method}: no answer within {limit_s:g} s ({self.timeout_key}). {stack}"
            ).at(self.place(method), stack) from None
        except (ProcessEndedError, UnreachableError) as error:
            raise WorkerDiedError(f"{self.label}, {method}: the process is gone: {self._silence or error}").at(
                self.place(method)
            ) from None
        except AnswerLostError as error:
            raise WorkerDiedError(f"{self.label}, {method}: its answer was lost with its node: {error}").at(
                self.place(method)
            ) from None
        except CallError as error:
            raise BackendError(f"{self.label}, {method}: {error}").at(self.place(method)) from None
        if isinstance(answer, Failure):
            raise answer.error(self.label, method, self.place(method))
        return answer.value

    async def stacks(self) -> str:
        """The stacks of the worker's threads, or why they are unavailable."""
        try:
            async with asyncio.timeout(_STACK_WAIT_S):
                text = await self.handle.ask("stacks")
        except TimeoutError:
            return (
                "It does not even say where it hangs: the process is stopped, or C code holds the interpreter. "
                "Look at it with py-spy"
            )
        except CallError as error:
            return f"Its stack cannot be had: {error}"
        return f"It hangs here:\n{text}"

    def kill(self) -> None:
        """End the process now."""
        if self._watch is not None:
            self._watch.cancel()
        if self._lost is None or not self._lost.done():
            self.handle.kill()


async def all_or_first_error(calls: Sequence[Awaitable[Any]], grace_s: float = PEERS_S) -> list[Any]:
    """Results of calls to several ranks of one group, in order.

    After one failure the others may wait in a collective for long: they get ``grace_s`` to report their errors, and are
    then abandoned. A dead process causes its peers' errors, so it is named first.

    Raises:
        ChatLearnError: the most informative failure; the others are notes on it.
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
