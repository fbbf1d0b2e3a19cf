"""Stores of ``torch.distributed`` that do not listen for the whole network. Needs torch and the standard library.

torch's own store listens on every interface of its host, and anybody who reaches it may read and change it. Here it
listens at one address. With a secret it listens on loopback only, behind a gate at that address which asks every caller
for a greeting (``greeting``); a rank elsewhere reaches it through a gate of its own, on its own loopback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from .greeting import ANSWER_BYTES, GREETING_BYTES, Caller, Doorkeeper

LOOPBACK = "127.0.0.1"
GREETING_S = 10.0
"""How long a connection may take to greet."""
MOST_STRANGERS = 64
"""Connections that may be greeting at the same time."""
RETRY_S = 0.2
CHUNK_BYTES = 1 << 16

Way = Callable[[socket.socket], socket.socket | None]
"""A connection that came in -> the one to join it to, or None to hang up."""


class PrivateStore:
    """A store, and the gate that leads to it, if there is one."""

    def __init__(self, store: TCPStore, port: int, gate: Gate | None) -> None:
        self.store = store
        self.port = port
        """Where others meet it; on a host that joined, the port that it has there."""
        self._gate = gate

    def close(self) -> None:
        """Cut off everyone who came through the gate. Twice is fine."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()


def open_store(host: str, port: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """Make a store that others on this host meet at ``host:port``, or others elsewhere if they know ``secret``.

    Args:
        host: an address of this host; nothing listens at any other.
        port: 0 takes one that is free.
        secret: None trusts everyone who reaches the address.
        timeout: of the store's operations.

    Raises:
        OSError: the address is not this host's, or is taken.
    """
    listener = listening_socket(host, port)
    port = listener.getsockname()[1]
    if secret is None:
        return PrivateStore(_serve(host, listener, timeout), port, None)
    inner = listening_socket(LOOPBACK, 0)
    inner_port = inner.getsockname()[1]
    store = _serve(LOOPBACK, inner, timeout)
    doorkeeper = Doorkeeper(secret)

    def way(connection: socket.socket) -> socket.socket | None:
        answer = doorkeeper.answer(_read_exactly(connection, GREETING_BYTES, doorkeeper.may_become_greeting))
        if answer is None:
            return None
        connection.sendall(answer)
        return socket.create_connection((LOOPBACK, inner_port))

    return PrivateStore(store, port, Gate(listener, way))


def join_store(host: str, port: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """Reach a store that ``open_store`` made with the same secret.

    Raises:
        RuntimeError: it cannot be reached in time, or what listens there does not know the secret.
    """
    if secret is None:
        return PrivateStore(TCPStore(host, port, is_master=False, timeout=timeout), port, None)
    deadline = time.monotonic() + timeout.total_seconds()
    _greeted(host, port, secret, deadline).close()  # what is wrong is said here, where the words are ours
    listener = listening_socket(LOOPBACK, 0)
    own_port = listener.getsockname()[1]

    def way(connection: socket.socket) -> socket.socket | None:
        return _greeted(host, port, secret, time.monotonic() + timeout.total_seconds())

    gate = Gate(listener, way)
    try:
        return PrivateStore(TCPStore(LOOPBACK, own_port, is_master=False, timeout=timeout), own_port, gate)
    except BaseException:
        gate.close()
        raise


class Gate:
    """Joins every connection that comes in to another one, in threads of its own."""

    def __init__(self, listener: socket.socket, way: Way) -> None:
        self._listener = listener
        self._way = way
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._finding = threading.BoundedSemaphore(MOST_STRANGERS)
        threading.Thread(target=self._accept, name="store gate", daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut every connection."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        for one in (self._listener, *connections):
            _shut(one)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except ConnectionError:  # who knocked is gone again
                continue
            except OSError:
                if self._closed:
                    self._listener.close()
                    return
                time.sleep(RETRY_S)  # no file descriptors are left, which may pass
                continue
            if not self._finding.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._join, args=(connection,), name="store gate", daemon=True).start()

    def _join(self, connection: socket.socket) -> None:
        other: socket.socket | None = None
        try:
            with self._known(connection):
                try:
                    connection.settimeout(GREETING_S)
                    other = self._way(connection)
                finally:
                    self._finding.release()
                if other is not None:
                    with other, self._known(other):
                        _carry(connection, other)
        except (OSError, RuntimeError):  # this connection's end, which both sides see
            pass
        finally:
            connection.close()

    @contextlib.contextmanager
    def _known(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the gate is closed")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)


def is_loopback(host: str) -> bool:
    """Whether an address or host name is reached from its own host only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_towards(host: str, port: int = 9) -> str:
    """The address of this host on the way to another; on loopback for a loopback address.

    Raises:
        OSError: the name cannot be resolved, or there is no way.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses the interface
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None if none has."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        table = Path("/proc/net/if_inet6")
        rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((row[5] for row in rows if ipaddress.IPv6Address(int(row[0], 16)) == wanted), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
                if ipaddress.IPv4Address(found) == wanted or (wanted.is_loopback and found[0] == 127):
                    return name
    return None


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at one address of this host.

    Raises:
        OSError: the address is not this host's, or the port is taken.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _serve(host: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _greeted(host: str, port: int, secret: str, deadline: float) -> socket.socket:
    """A connection to a gate, past the greeting; tries again until the gate listens and has room for it."""
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(left, 0.001))
        except OSError as error:
            if left <= RETRY_S:
                raise RuntimeError(f"the store at {host}:{port} cannot be reached: {error}") from error
        else:
            if _is_let_in(connection, host, port, secret, left):
                return connection
            if deadline - time.monotonic() <= RETRY_S:
                raise RuntimeError(
                    f"what listens at {host}:{port} hung up on every greeting: it is not the store that was meant and"
                    f" does not know its secret, or {MOST_STRANGERS} connections that say nothing keep it busy"
                )
        time.sleep(RETRY_S)


def _is_let_in(connection: socket.socket, host: str, port: int, secret: str, left: float) -> bool:
    """Greet; False if the other end hangs up without a word, as a gate does to a wrong secret or when it is full."""
    try:
        caller = Caller(secret)
        connection.settimeout(max(left, 0.001))
        try:
            connection.sendall(caller.greeting)
            answer = _read_exactly(connection, ANSWER_BYTES)
        except ConnectionError:  # it hung up before it had read the greeting
            answer = b""
        if answer and not caller.accepts(answer):
            raise RuntimeError(
                f"what listens at {host}:{port} is not the store that was meant: it does not know its secret"
            )
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise RuntimeError(f"the store at {host}:{port} did not let this process in: {error}") from error
        raise
    if not answer:
        connection.close()
    return bool(answer)


def _read_exactly(connection: socket.socket, size: int, goes_on: Callable[[bytes], bool] = lambda data: True) -> bytes:
    """What arrives up to ``size`` bytes; less if the other end closes, or if ``goes_on`` says so.

    The connection's timeout is that of the whole.
    """
    limit = connection.gettimeout()
    deadline = time.monotonic() + limit if limit is not None else None
    data = b""
    while len(data) < size and goes_on(data):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        more = connection.recv(size - len(data))
        if not more:
            break
        data += more
    return data


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Bring what either says to the other, until one of them is closed."""
    one.settimeout(None)
    other.settimeout(None)
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(CHUNK_BYTES)
                if not data:
                    return
                key.data.sendall(data)


def _shut(connection: socket.socket) -> None:
    """End a connection or a listener under the thread that waits on it, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
