"""The control path of a sync between processes: small messages over sockets; the tensors travel separately.

The sender listens (``Hub``) and every receiver connects (``chatlearn_sync.intake``). When a process ends, the kernel
closes its socket, so the other end notices at once; ``plan.timeout_s`` bounds every wait for a process that hangs.
From a new connection the hub reads only a greeting of fixed size until the peer has proved that it knows the offer's
token. Anything else closes that connection and leaves the sync unaffected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.types import Endpoint, SyncRequest
from chatlearn_hosting.engine_side.greeting import GREETING_BYTES, Doorkeeper
from chatlearn_sync.addresses import bound_socket
from chatlearn_sync.messages import READ_BYTES, Address, Decoder, Message, encode, error_text, key_of
from chatlearn_sync.stream import describe, describe_endpoint

MOST_STRANGERS = 64
"""Maximum number of connections without a greeting, beyond one per receiver; one more closes the oldest."""
TELL_S = 1.0
"""Time limit for sending the error of a failed sync to a receiver that does not read, seconds."""


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection from the moment it is accepted."""

    connection: socket.socket
    greeting: bytes = b""
    greeted: bool = False
    decoder: Decoder = field(default_factory=Decoder)
    peer: Peer | None = None
    """The receiver at the other end, once it has sent its hello."""


@dataclass(slots=True, eq=False)
class Peer:
    """The sender's view of one receiver."""

    endpoint: Endpoint
    connection: socket.socket | None = None
    hello: Message = field(default_factory=dict)
    acknowledged: int = -1
    """Number of the last bucket that the receiver loaded; the end of the stream counts as a bucket."""
    lost: str | None = None
    """Reason why the receiver no longer takes part; None: it does."""


class Hub:
    """The sender's end: one connection per receiver of the plan.

    A receiver that fails, or stays silent for ``plan.timeout_s``, leaves the sync and the others continue; the send
    fails when no receiver remains. Only the sending thread may call methods other than ``release`` and ``nudge``.

    Args:
        host: address under which receivers reach this process over TCP; None: all are on this host and use a Unix
            socket.
        collective: the tensors travel in a collective of all receivers. A receiver that reports a failure then still
            gets every message, because it takes part to the end, and a closed connection ends the sync.
    """

    def __init__(
        self, plan: SyncRequest, transport: str, sender: Endpoint, host: str | None = None, *, collective: bool = False
    ) -> None:
        self.sender = sender
        self._where = f"{describe(plan, transport)}, sender {describe_endpoint(sender)}"
        self._timeout_s = plan.timeout_s
        self._collective = collective
        self._peers = {key_of(endpoint): Peer(endpoint) for endpoint in plan.receivers}
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        """Held by the sending thread."""
        self._closed = False
        self._end: int | None = None
        """Number of the end of the stream, once sent; a receiver that has acknowledged it may disconnect."""
        token = secrets.token_hex(32)
        self._doorkeeper = Doorkeeper(token)
        self._strangers: list[_Visitor] = []
        if host is None:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"chatlearn-{os.getpid()}-{secrets.token_hex(8)}"
            self._listener.bind(f"\0{name}")
            self.address = Address("unix", name, 0, token)
        else:
            self._listener = bound_socket(host)
            self.address = Address("tcp", host, self._listener.getsockname()[1], token)
        self._listener.listen(len(plan.receivers) + 8)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wake)

    @property
    def is_alone(self) -> bool:
        """Whether this sender has no receiver."""
        return not self._peers

    @property
    def live(self) -> list[Peer]:
        """Receivers that still take part and have not failed."""
        return [peer for peer in self._peers.values() if peer.lost is None]

    def wait_connected(self) -> None:
        """Block until every receiver has connected and sent its hello.

        Raises: as ``wait_acknowledged``.
        """
        self._wait(lambda peer: peer.connection is not None, "connect")

    def wait_acknowledged(self, number: int) -> None:
        """Block until every remaining receiver has acknowledged bucket ``number``.

        Raises:
            WeightSyncError: no receiver remains, or the sync was released.
            BackendTimeoutError: the remaining receivers did not answer in time; names them.
        """
        self._wait(lambda peer: peer.acknowledged >= number, "acknowledge a bucket")

    def end(self, number: int) -> None:
        """Announce the end of the stream after ``number`` buckets; block until every remaining receiver acknowledges.

        Raises: as ``wait_acknowledged``.
        """
        self._end = number
        self.say({"end": number})
        self.wait_acknowledged(number)

    def say(self, message: Message) -> None:
        """Send a message to every remaining receiver."""
        for peer in self._peers.values():
            if peer.connection is not None and (peer.lost is None or self._collective):
                self.say_to(peer, message)

    def say_to(self, peer: Peer, message: Message) -> None:
        """Send a message to one receiver; a receiver whose connection fails is lost."""
        assert peer.connection is not None, "wait_connected comes first"
        try:
            peer.connection.sendall(encode(message))
        except OSError as error:
            self._lose(peer, f"disconnected: {error}")

    def check(self, wait_s: float | None = 0.0) -> None:
        """Process messages from receivers; wait for one until ``nudge``, or for at most ``wait_s`` (None: no limit).

        Raises:
            WeightSyncError: no receiver remains, or the sync was released.
        """
        self._pump(wait_s)
        self._require_live()

    def nudge(self) -> None:
        """Wake a waiting ``check``; any thread may call this."""
        with self._lock:
            if not self._closed:
                self._wake.send(b"x")

    def behind(self, number: int) -> str:
        """Return the receivers that have not acknowledged bucket ``number``, as text for a message."""
        waiting = [peer.endpoint for peer in self._peers.values() if peer.acknowledged < number]
        return ", ".join(describe_endpoint(endpoint) for endpoint in waiting) or "none"

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Wrap the work of the sending thread: send an exception to the receivers, and close every connection."""
        with self._busy:
            try:
                yield
            except BaseException as error:
                self._close(error)
                raise
            self._close(None)

    def release(self, cause: BaseException, *, wait_s: float = 0.0) -> None:
        """End the sync: a send still in progress raises, and receivers get ``cause``. Idempotent; any thread may call.

        Args:
            wait_s: time to wait for that send to return, for callers that then free memory the send uses, seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._failure = self._failure or cause
            self._wake.send(b"x")
        if self._busy.acquire(blocking=wait_s > 0.0, timeout=wait_s or -1):  # no thread is sending, so close here
            try:
                self._close(self._failure)
            finally:
                self._busy.release()

    def _close(self, cause: BaseException | None) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if cause is not None:
            for peer in self._peers.values():
                self._tell(peer, error_text(cause))
            self._hear_out()
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.close()
                peer.connection = None
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()
        self._wake.close()

    def _tell(self, peer: Peer, reason: str) -> None:
        """Send a receiver the reason for the end; one that cannot be reached notices the closed socket."""
        if peer.connection is not None:
            peer.connection.settimeout(TELL_S)
            with contextlib.suppress(OSError):
                peer.connection.sendall(encode({"failed": reason}))

    def _hear_out(self) -> None:
        """Let receivers close first: closing a socket with unread data resets it and discards the reason just sent."""
        deadline = time.monotonic() + TELL_S
        for peer in self._peers.values():
            if peer.connection is None:
                continue
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
                peer.connection.settimeout(max(0.001, deadline - time.monotonic()))
                while peer.connection.recv(READ_BYTES) and time.monotonic() < deadline:
                    pass

    def _wait(self, done: Callable[[Peer], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._pump(0.0)
            self._require_live()
            waiting = [peer for peer in self.live if not done(peer)]
            if not waiting:
                return
            remaining = deadline - time.monotonic()
            if remaining > 0:
                self._pump(remaining)
                continue
            for peer in waiting:
                reason = f"did not {what} within {self._timeout_s:g} s (weight_sync.timeout_s)"
                self._lose(peer, reason)
                self._tell(peer, f"the sender dropped {describe_endpoint(peer.endpoint)}: it {reason}")
            if self._collective or not self.live:
                raise BackendTimeoutError(f"{self._where} waited for receivers. {self._losses()}")

    def _require_live(self) -> None:
        if self._failure is not None:
            raise WeightSyncError(f"{self._where}: ended on the sender's side: {self._failure}") from self._failure
        if not self.live:
            raise WeightSyncError(f"{self._where}: no receiver remains. {self._losses()}")
        gone = [peer for peer in self._peers.values() if peer.lost is not None and peer.connection is None]
        if self._collective and gone:
            raise WeightSyncError(f"{self._where}: a receiver of the collective disconnected. {self._losses()}")

    def _losses(self) -> str:
        lost = [f"{describe_endpoint(p.endpoint)}: {p.lost}" for p in self._peers.values() if p.lost is not None]
        return "; ".join(lost) if lost else "The plan names no receivers."

    def _pump(self, wait_s: float | None) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _drain_wake(self) -> None:
        self._woken.recv(READ_BYTES)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the connection is already gone
            return
        connection.settimeout(self._timeout_s)
        visitor = _Visitor(connection)
        self._strangers.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(visitor))
        if len(self._strangers) > MOST_STRANGERS + len(self._peers):
            self._hang_up(self._strangers[0])

    def _read(self, visitor: _Visitor) -> None:
        """Read from a connection; any error closes this connection and no other."""
        if visitor.connection.fileno() < 0:  # closed after the selector reported it as readable
            return
        try:
            if not visitor.greeted:
                self._read_greeting(visitor)
                return
            data = visitor.connection.recv(READ_BYTES)
            for message in visitor.decoder.feed(data):
                if visitor.peer is None:
                    self._admit(visitor, message)
                else:
                    self._hear(visitor.peer, message)
        except (OSError, ValueError, TypeError):
            data = b""
        if not data:
            self._hang_up(visitor)

    def _read_greeting(self, visitor: _Visitor) -> None:
        data = visitor.connection.recv(GREETING_BYTES - len(visitor.greeting))
        visitor.greeting += data
        if not data or not self._doorkeeper.may_become_greeting(visitor.greeting):
            self._hang_up(visitor)
        elif len(visitor.greeting) == GREETING_BYTES:
            answer = self._doorkeeper.answer(visitor.greeting)
            if answer is None:
                self._hang_up(visitor)
            else:
                visitor.connection.sendall(answer)
                visitor.greeted = True

    def _admit(self, visitor: _Visitor, message: Message) -> None:
        """Bind a connection to its receiver; raises ValueError or TypeError if the hello names no expected one."""
        peer = self._peers.get(tuple(message.get("receiver", ())))
        if peer is None or peer.connection is not None:
            raise ValueError("the hello names no receiver that is still expected")
        peer.connection, peer.hello, visitor.peer = visitor.connection, message, peer
        self._strangers.remove(visitor)

    def _hang_up(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor in self._strangers:
            self._strangers.remove(visitor)
        peer = visitor.peer
        if peer is not None and peer.connection is visitor.connection:
            peer.connection = None
            if self._end is None or peer.acknowledged < self._end:
                self._lose(peer, "disconnected: its process ended, or its sync failed")

    def _hear(self, peer: Peer, message: Message) -> None:
        if "acknowledged" in message:
            peer.acknowledged = int(message["acknowledged"])
        elif "failed" in message:
            self._lose(peer, str(message["failed"]))

    def _lose(self, peer: Peer, reason: str) -> None:
        peer.lost = peer.lost or reason
