"""The receiver's end of a sync between processes: follows every sender's control path and hands buckets on."""

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
"""How long to listen to a sender whose bucket broke off."""


@dataclass(slots=True, eq=False)
class Source:
    """One sender as a receiver sees it."""

    offer: ControlOffer
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    caller: Caller
    known: bool = False
    """Whether the other end has proved that it is the sender; nothing that it says is read before."""
    decoder: Decoder = field(default_factory=Decoder)
    waiting: list[Message] = field(default_factory=list)
    ended: bool = False

    @property
    def sender(self) -> Endpoint:
        return self.offer.sender

    def say(self, message: Message) -> None:
        """Send a message; to a sender that is gone it is lost, which the next read shows."""
        self.writer.write(encode(message))


class Intake(ABC):
    """Takes one sync from all senders at the same time, so that no rank's stream waits for another's.

    A transport says what a bucket is (``take``). Bucket ``n`` is acknowledged when ``take`` returns, or later by the
    transport (``acknowledges_later``); the end of the streams when every sender has ended, all that was taken is
    settled and no tensor is missing.

    Args:
        where: leads every message.
    """

    acknowledges_later: ClassVar[bool] = False
    """``take`` returns before the bucket is there; who waits for it acknowledges it."""

    def __init__(self, plan: SyncRequest, transport: str, endpoint: Endpoint) -> None:
        self.plan = plan
        self.endpoint = endpoint
        self.where = f"{describe(plan, transport)}, receiver {describe_endpoint(endpoint)}"
        self.check = StreamCheck(plan.manifest, self.where)
        self.num_bytes = 0
        self.sources: list[Source] = []

    @abstractmethod
    async def take(self, source: Source, message: Message) -> None:
        """One bucket, or another message of the transport's own that is answered like one."""

    async def ended(self, source: Source) -> None:  # noqa: B027  # most transports need not know
        """A sender has sent everything."""

    async def settle(self) -> None:  # noqa: B027  # most transports leave nothing running
        """All senders have ended: finish what ``take`` left running."""

    def hello(self) -> Message:
        """What a sender has to know of this receiver."""
        return {}

    async def run(self, offers: Sequence[ControlOffer]) -> int:
        """Follow every sender to its end; returns the number of bytes taken.

        Raises:
            WeightSyncError: a sender failed or went away, or a tensor did not arrive.
            BackendTimeoutError: nothing came for ``plan.timeout_s``; names the ranks.
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
                f"{str(error) or 'no answer in time'}. Its process has ended, or the hosts do not see each other"
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
                    f"{self.where}: sender {describe_endpoint(source.sender)} went away: its process has ended"
                )
            source.waiting += source.decoder.feed(data)
        return source.waiting.pop(0)

    async def _require_sender(self, source: Source) -> None:
        if not source.known and not source.caller.accepts(await source.reader.readexactly(ANSWER_BYTES)):
            raise WeightSyncError(
                f"{self.where}: what listens at {source.offer.address.host} is not sender"
                f" {describe_endpoint(source.sender)}: it does not know the secret of this sync"
            )
        source.known = True

    async def _require_alive(self, source: Source, error: Exception) -> None:
        """A bucket that broke off is most often the doing of its sender, which may have said why."""
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
        """Ranks of the senders that may send more."""
        return frozenset(source.sender.rank for source in self.sources if not source.ended)


async def first_error(work: Sequence[Any]) -> None:
    """Run coroutines at the same time; the first failure ends the others and is raised, alone."""
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
    """The offers of this transport.

    Raises:
        WeightSyncError: one is of another transport.
    """
    contents: list[ControlOffer] = []
    for offer in offers:
        content = offer.content
        if not isinstance(content, ControlOffer) or content.transport != transport:
            kind = repr(content.transport) if isinstance(content, ControlOffer) else type(content).__name__
            raise WeightSyncError(
                f"{describe(plan, transport)}: sender rank {offer.sender_rank} made an offer of {kind}, which is not "
                f"one of {transport!r}; both ends must be given the same transport"
            )
        contents.append(content)
    return contents


async def _connect_unix(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Like ``asyncio.open_unix_connection``, also for abstract names on uvloop, which takes them for files."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, path)
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_unix_connection(sock=connection)
