"""Calls of a worker that call other roles while they run.

Calls go only from the driver to workers. The driver therefore begins such a call, then polls it: each answer is the
call's result, or its requests to other roles, which the driver has answered and delivers. Every message has a timeout,
and no connection is needed beyond those of the runtime.

    driver                                     worker
    begin(1, "score", samples)             ->  starts the call
    progress(1)                            ->  waits until something has come of it
                                           <-  asked: [(7, "judge", GenerateRequest)]
    (the judge's fleet samples)
    tell(1, 7, [(0, [5, 9])])              ->  only if the call asks for tokens as they are sampled
    deliver(1, 7, completion)              ->  the call goes on
    progress(1)                            ->
                                           <-  result: [RewardResult]
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from chatlearn_core import exceptions
from chatlearn_core.exceptions import BackendError, ChatLearnError, ContractError
from chatlearn_core.protocols import OnTokens
from chatlearn_workers.remote import RemoteWorker
from chatlearn_workers.rpc_result import Failure, RpcResult

PROGRESS_S = 5.0
"""A worker without news answers after this time, seconds, and is polled again."""

Ask = Callable[..., Awaitable[Any]]
"""``(name, request)`` -> the answer of the role with that name. A third argument, an ``OnTokens``, is given only for a
request whose call asks for tokens as they are sampled."""
Told = tuple[int, list[int]]
"""Arguments of an ``OnTokens``."""


@dataclass(slots=True, frozen=True)
class Asked:
    """A request of a call to another role."""

    number: int
    name: str
    request: Any
    streams: bool = False
    """Whether the call asks for tokens as they are sampled."""


@dataclass(slots=True, frozen=True)
class Progress:
    """The news of a call since the last poll."""

    asked: tuple[Asked, ...] = ()
    dropped: tuple[int, ...] = ()
    """Numbers of requests that the call no longer waits for."""
    outcome: RpcResult | Failure | None = None
    """Set when the call has ended."""


# The worker's side.


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call while it runs in the worker."""

    task: asyncio.Task[Any] | None = None
    asked: list[Asked] = field(default_factory=list)
    """Requests that the driver has not yet taken."""
    dropped: list[int] = field(default_factory=list)
    waiting: dict[int, asyncio.Future[RpcResult | Failure]] = field(default_factory=dict)
    watching: dict[int, OnTokens] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def ask(self, name: str, request: Any, on_tokens: OnTokens | None = None) -> Any:
        """Send a request through the driver and return the delivered answer.

        Args:
            on_tokens: called with tokens as they are sampled, if the role is a generator that streams.

        Raises:
            ChatLearnError: the error of the role, or of reaching it.
        """
        number = next(self.numbers)
        answer: asyncio.Future[RpcResult | Failure] = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        if on_tokens is not None:
            self.watching[number] = on_tokens
        self.asked.append(Asked(number, name, request, on_tokens is not None))
        self.news.set()
        try:
            outcome = await answer
        except asyncio.CancelledError:
            self.dropped.append(number)
            self.news.set()
            raise
        finally:
            self.waiting.pop(number, None)
            self.watching.pop(number, None)
        if isinstance(outcome, Failure):
            raise _raised(outcome)
        return outcome.value


_CURRENT: ContextVar[OpenCall | None] = ContextVar("_CURRENT", default=None)


def current_call() -> OpenCall:
    """The call that this task belongs to.

    Raises:
        ContractError: there is none, such as in a task that outlives its call or a thread that a plugin started.
    """
    call = _CURRENT.get()
    if call is None or (call.task is not None and call.task.done()):
        raise ContractError(
            "another role is called when no call on this worker is open: call it from the method that the runtime "
            "awaits, or a task that ends before it does"
        )
    return call


class Conversations:
    """The open calls of one worker.

    Args:
        target: the object whose methods are called.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._calls: dict[int, OpenCall] = {}

    def begin(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call."""
        call = OpenCall()
        token = _CURRENT.set(call)
        try:
            call.task = asyncio.create_task(getattr(self._target, method)(*arguments))
        finally:
            _CURRENT.reset(token)
        call.task.add_done_callback(lambda _: call.news.set())
        self._calls[number] = call

    async def progress(self, number: int, wait_s: float) -> Progress:
        """Return news as soon as there is some, at the latest after ``wait_s``."""
        call = self._calls[number]
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await call.news.wait()
        call.news.clear()
        asked, call.asked = tuple(call.asked), []
        dropped, call.dropped = tuple(call.dropped), []
        assert call.task is not None, "a call begins with its task"
        if not call.task.done():
            return Progress(asked, dropped)
        del self._calls[number]
        return Progress((), dropped, _outcome(call.task))

    def tell(self, number: int, request: int, told: Sequence[Told]) -> None:
        """Tell of a request's tokens; dropped if the call no longer waits for its answer."""
        call = self._calls.get(number)
        on_tokens = call.watching.get(request) if call is not None else None
        if on_tokens is not None:
            for start, token_ids in told:
                on_tokens(start, token_ids)

    def deliver(self, number: int, request: int, outcome: RpcResult | Failure) -> None:
        """Deliver the answer to a call's request; dropped if the call no longer waits for it."""
        call = self._calls.get(number)
        answer = call.waiting.get(request) if call is not None else None
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    def end(self, number: int) -> None:
        """Cancel a call; a call that has ended is no error."""
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.task.cancel()


def _outcome(task: asyncio.Task[Any]) -> RpcResult | Failure:
    if task.cancelled():
        return Failure.of(BackendError("the call cancelled itself"))
    error = task.exception()
    return RpcResult(task.result()) if error is None else Failure.of(error)


def _raised(failure: Failure) -> ChatLearnError:
    """The error, with the message that it had in the driver."""
    cls = getattr(exceptions, failure.error_class)
    assert issubclass(cls, ChatLearnError)
    error: ChatLearnError = cls(failure.message)
    return error


# The driver's side.

_NUMBERS = itertools.count()
_ENDING: set[asyncio.Task[None]] = set()


async def converse(worker: RemoteWorker, method: str, *arguments: Any, ask: Ask, limit_s: float | None = None) -> Any:
    """Call a method of a worker, and meanwhile have its requests to other roles answered.

    Args:
        method: a coroutine method of the worker that may call ``current_call().ask``.
        ask: answers requests.
        limit_s: maximum time for which the worker's event loop may be blocked, seconds; by default the worker's
            timeout. Time spent by other roles does not count, because they, and the worker's own code, have their own
            timeouts.

    Raises:
        BackendTimeoutError: the worker does not answer.
        WorkerDiedError: the worker's process is gone.
        RoleLostError: a called role can no longer work.
        ChatLearnError: the worker's error.
    """
    number = next(_NUMBERS)
    patience_s = PROGRESS_S + (worker.timeout_s if limit_s is None else limit_s)
    answering: dict[int, asyncio.Task[None]] = {}
    failures: list[Exception] = []
    lost: list[Exception] = []

    async def answer(asked: Asked) -> None:
        if not asked.streams:
            await deliver(asked, None)
            return
        telling = _Telling(worker, number, asked.number, patience_s)
        try:
            await deliver(asked, telling)
        finally:
            telling.close()

    async def deliver(asked: Asked, telling: _Telling | None) -> None:
        outcome: RpcResult | Failure
        more = () if telling is None else (telling.told,)
        try:
            outcome = RpcResult(await ask(asked.name, asked.request, *more))
        except Exception as error:
            if isinstance(error, exceptions.RoleLostError):
                lost.append(error)
            outcome = Failure.of(error)
        try:
            if telling is not None:
                await telling.end()
            await worker.call("deliver", number, asked.number, outcome, timeout_s=patience_s)
        except Exception as error:
            failures.append(error)  # the driver's next poll of the worker shows the cause

    has_ended = False
    try:
        await worker.call("begin", number, method, arguments)
        while True:
            progress: Progress = await worker.call("progress", number, PROGRESS_S, timeout_s=patience_s)
            for dropped in progress.dropped:
                if (task := answering.pop(dropped, None)) is not None:
                    task.cancel()
            for asked in progress.asked:
                answering[asked.number] = asyncio.create_task(answer(asked))
            if failures:
                raise failures[0]
            if progress.outcome is not None:
                has_ended = True
                return _result(worker, method, progress.outcome, lost)
    finally:
        for task in answering.values():
            task.cancel()
        if not has_ended:
            ending = asyncio.create_task(_end(worker, number))
            _ENDING.add(ending)
            ending.add_done_callback(_ENDING.discard)


class _Telling:
    """Tells a call of a request's tokens: one message at a time, each with all that has come since the last."""

    def __init__(self, worker: RemoteWorker, number: int, request: int, timeout_s: float) -> None:
        self._worker = worker
        self._place = number, request
        self._timeout_s = timeout_s
        self._waiting: list[Told] = []
        self._sending: asyncio.Task[None] | None = None
        """While something is told, or once telling has failed."""

    def told(self, start: int, token_ids: list[int]) -> None:
        """An ``OnTokens``."""
        self._waiting.append((start, token_ids))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())

    async def end(self) -> None:
        """Return when everything is told. Raises as the worker's call does."""
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        while self._waiting:
            told, self._waiting = self._waiting, []
            await self._worker.call("tell", *self._place, told, timeout_s=self._timeout_s)
        self._sending = None

    def close(self) -> None:
        """Tell no more."""
        if self._sending is not None:
            self._sending.cancel()


def _result(worker: RemoteWorker, method: str, outcome: RpcResult | Failure, lost: list[Exception]) -> Any:
    if lost:
        raise lost[0]
    if isinstance(outcome, Failure):
        raise outcome.error(worker.label, method, worker.place(method))
    return outcome.value


async def _end(worker: RemoteWorker, number: int) -> None:
    """Tell a worker that a call is cancelled; a worker that is gone or hangs has nothing to end."""
    with suppress(ChatLearnError):
        await worker.call("end", number, timeout_s=PROGRESS_S)


class AskingWorker:
    """Mixin for a ``Worker`` whose calls send requests to other roles."""

    def __init__(self) -> None:
        self.conversations = Conversations(self)

    async def begin(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """See ``Conversations``."""
        self.conversations.begin(number, method, arguments)

    async def progress(self, number: int, wait_s: float) -> Progress:
        """See ``Conversations``."""
        return await self.conversations.progress(number, wait_s)

    async def tell(self, number: int, request: int, told: Sequence[Told]) -> None:
        """See ``Conversations``."""
        self.conversations.tell(number, request, told)

    async def deliver(self, number: int, request: int, outcome: RpcResult | Failure) -> None:
        """See ``Conversations``."""
        self.conversations.deliver(number, request, outcome)

    async def end(self, number: int) -> None:
        """See ``Conversations``."""
        self.conversations.end(number)
