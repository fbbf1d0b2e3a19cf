"""The receiver's end of a sync between processes: reads every sender's control path and takes its buckets."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_hosting.engine_side.greeting import ANSWER_BYTES, Caller
from chatlearn_sync.messages import READ_BYTES, ControlOffer, Decoder, Message, encode, error_text, hello_of
from chatlearn_sync.stream import StreamCheck, describe, describe_endpoint

LAST_WORDS_S = 0.2
"""Time to wait for a sender's error after one of its buckets failed, seconds."""


@dataclass(slots=True, eq=False)
class Source:
    """A receiver's view of one sender."""

    offer: ControlOffer
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    caller: Caller
    known: bool = False
    """Whether the other end has proved that it is the sender; no message is read before that."""
    decoder: Decoder = field(default_factory=Decoder)
    waiting: list[Message] = field(default_factory=list)
    ended: bool = False

    @property
    def sender(self) -> Endpoint:
        return self.offer.sender

    def say(self, message: Message) -> None:
        """Send a message; if the sender has ended, the message is lost and the next read raises."""
        self.writer.write(encode(message))


class Intake(ABC):
    """Receives one sync from all senders concurrently, so that no rank's stream waits for another's.

    A transport implements ``take`` for one bucket. Bucket ``n`` is acknowledged when ``take`` returns, or later by the
    transport itself (``acknowledges_later``). The end of the streams is acknowledged once every sender has ended,
    ``settle`` has returned and no tensor is missing.
    """

    acknowledges_later: ClassVar[bool] = False
    """Whether ``take`` returns before the bucket has arrived; the transport then acknowledges each bucket."""

    def __init__(self, plan: SyncRequest, transport: str, endpoint: Endpoint) -> None:
        self.plan = plan
        self.endpoint = endpoint
        self.where = f"{describe(plan, transport)}, receiver {describe_endpoint(endpoint)}"
        self.check = StreamCheck(plan.manifest, self.where)
        self.num_bytes = 0
        self.sources: list[Source] = []

    @abstractmethod
    async def take(self, source: Source, message: Message) -> None:
        """Take one bucket, or another message that the transport defines."""

    async def ended(self, source: Source) -> None:  # noqa: B027  # most transports do not need it
        """Called when a sender has sent everything."""

    async def settle(self) -> None:  # noqa: B027  # most transports leave nothing running
        """Finish tasks that ``take`` started; called when all senders have ended."""

    def hello(self) -> Message:
        """Return the facts about this receiver that the transport's sender needs."""
        return {}

    async def run(self, offers: Sequence[ControlOffer]) -> int:
        """Receive from every sender until its end; returns the number of bytes.

        Raises:
            WeightSyncError: a sender failed or disconnected, or a tensor did not arrive.
            BackendTimeoutError: no message arrived for ``plan.timeout_s``; names the ranks.
        """
        try:
            for offer in offers:
                self.sources.append(await self._connect(offer))
            await first_error([self._follow(source) for source in self.sources])
            await self.settle()
            self.check.complete()
            for source in self.sources:
                source.say({"acknowledged": source.waiting.pop()["end"]})
        except BaseException as error:
            for source in self.sources:
                source.say({"failed": error_text(error)})
            raise
        finally:
            for source in self.sources:
                source.writer.close()
        return self.num_bytes

    async def _connect(self, offer: ControlOffer) -> Source:
        address = offer.address
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                if address.family == "unix":
                    reader, writer = await _connect_unix(f"\0{address.host}")
                else:
                    reader, writer = await asyncio.open_connection(address.host, address.port)
        except (OSError, TimeoutError) as error:
            place = address.host if address.family == "unix" else f"{address.host}:{address.port}"
            raise WeightSyncError(
                f"{self.where}: sender {describe_endpoint(offer.sender)} cannot be reached at {place}: "
                f"{str(error) or 'no answer in time'}. Either its process has ended, or the network does not connect "
                "the two hosts"
            ) from error
        source = Source(offer, reader, writer, Caller(address.token))
        writer.write(source.caller.greeting)
        source.say(hello_of(self.endpoint, **self.hello()))
        return source

    async def _follow(self, source: Source) -> None:
        while True:
            message = await self._next(source)
            if "failed" in message:
                raise WeightSyncError(
                    f"{self.where}: sender {describe_endpoint(source.sender)} failed: {message['failed']}"
                )
            if "end" in message:
                source.ended = True
                source.waiting.append(message)
                await self.ended(source)
                return
            try:
                await self.take(source, message)
            except Exception as error:
                await self._require_alive(source, error)
                raise
            if "bucket" in message and not self.acknowledges_later:
                source.say({"acknowledged": message["bucket"]})

    async def _next(self, source: Source) -> Message:
        while not source.waiting:
            try:
                # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the result.
                async with asyncio.timeout(self.plan.timeout_s):
                    await self._require_sender(source)
                    data = await source.reader.read(READ_BYTES)
            except TimeoutError as error:
                raise BackendTimeoutError(
                    f"{self.where}: waited {self.plan.timeout_s:g} s (weight_sync.timeout_s) for sender ranks "
                    f"{sorted(self.awaited())} of role {source.sender.role!r}, which sent nothing"
                ) from error
            except (OSError, asyncio.IncompleteReadError):
                data = b""
            if not data:
                raise WeightSyncError(
                    f"{self.where}: sender {describe_endpoint(source.sender)} disconnected: its process has ended"
                )
            source.waiting += source.decoder.feed(data)
        return source.waiting.pop(0)

    async def _require_sender(self, source: Source) -> None:
        if not source.known and not source.caller.accepts(await source.reader.readexactly(ANSWER_BYTES)):
            raise WeightSyncError(
                f"{self.where}: the process listening at {source.offer.address.host} is not sender"
                f" {describe_endpoint(source.sender)}: it does not know the secret of this sync"
            )
        source.known = True

    async def _require_alive(self, source: Source, error: Exception) -> None:
        """Prefer the sender's own error: a failed bucket is most often the result of a failed sender."""
        message: Message = {}
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while "failed" not in message:
                    message = await self._next(source)
        except (TimeoutError, WeightSyncError):
            return
        raise WeightSyncError(
            f"{self.where}: sender {describe_endpoint(source.sender)} failed: {message['failed']}"
        ) from error

    def awaited(self) -> frozenset[int]:
        """Return the ranks of the senders that have not ended."""
        return frozenset(source.sender.rank for source in self.sources if not source.ended)


async def first_error(work: Sequence[Any]) -> None:
    """Run coroutines concurrently; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else (set(), set())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


def offers_of(offers: Sequence[SyncOffer], plan: SyncRequest, transport: str) -> list[ControlOffer]:
    """Return the contents of the offers, checked to be of this transport.

    Raises:
        WeightSyncError: an offer comes from another transport.
    """
    contents: list[ControlOffer] = []
    for offer in offers:
        content = offer.content
        if not isinstance(content, ControlOffer) or content.transport != transport:
            kind = repr(content.transport) if isinstance(content, ControlOffer) else type(content).__name__
            raise WeightSyncError(
                f"{describe(plan, transport)}: sender rank {offer.sender_rank} made an offer of {kind}, which is not "
                f"one of {transport!r}; both ends must use the same transport"
            )
        contents.append(content)
    return contents


async def _connect_unix(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Like ``asyncio.open_unix_connection``, but also for abstract names on uvloop, which treats them as files."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, path)
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_unix_connection(sock=connection)
