"""Collects what concurrent callers ask for into batches, of which a bounded number is under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    result: asyncio.Future[ResultT]
    since: float
    """Event loop's time, seconds."""


class RequestBatcher(Generic[ItemT, ResultT]):
    """Sends items in batches of at most ``batch_size``, in order of arrival.

    A batch is sent when it is full or its first item has waited ``wait_s``, and fewer than ``max_batches`` are under
    way. Until then items wait here. All methods are called on one event loop.

    Args:
        send: returns one result per item, in order. If it raises, every caller of the batch gets the exception.
        wait_s: longest wait for further items, seconds, while a batch may be sent.
    """

    def __init__(
        self,
        send: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT]]],
        *,
        batch_size: int,
        wait_s: float,
        max_batches: int,
    ) -> None:
        self._send = send
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._max_batches = max_batches
        self._waiting: deque[_Waiting[ItemT, ResultT]] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def ask(self, item: ItemT) -> ResultT:
        """The item's result. Cancelling the caller withdraws the item; a batch whose callers are all gone ends."""
        loop = asyncio.get_running_loop()
        entry = _Waiting[ItemT, ResultT](item, loop.create_future(), loop.time())
        self._waiting.append(entry)
        self._dispatch()
        return await entry.result

    def _dispatch(self) -> None:
        """Send what may be sent; otherwise come back when the first item has waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        self._waiting = deque(entry for entry in self._waiting if not entry.result.done())
        while self._waiting and len(self._under_way) < self._max_batches:
            due = self._waiting[0].since + self._wait_s
            if len(self._waiting) < self._batch_size and loop.time() < due:
                self._timer = loop.call_at(due, self._dispatch)
                return
            batch = [self._waiting.popleft() for _ in range(min(self._batch_size, len(self._waiting)))]
            task = loop.create_task(self._run(batch))
            self._under_way.add(task)
            task.add_done_callback(self._ended)
            for entry in batch:
                entry.result.add_done_callback(partial(_end_unwanted, batch, task))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._dispatch()

    async def _run(self, batch: Sequence[_Waiting[ItemT, ResultT]]) -> None:
        try:
            results = await self._send([entry.item for entry in batch])
        except Exception as error:
            for entry in batch:
                if not entry.result.done():
                    entry.result.set_exception(error)
            return
        for entry, result in zip(batch, results, strict=True):
            if not entry.result.done():
                entry.result.set_result(result)


def _end_unwanted(
    batch: Sequence[_Waiting[ItemT, ResultT]], sent: asyncio.Task[None], _: asyncio.Future[ResultT]
) -> None:
    if all(entry.result.cancelled() for entry in batch):
        sent.cancel()
