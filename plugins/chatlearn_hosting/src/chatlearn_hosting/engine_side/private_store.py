"""Stores of ``torch.distributed`` that do not listen to the whole network. Needs torch and the standard library.

torch's own store listens on every interface, and every process that reaches it can read and change it. A private store
listens at one address. With a secret it listens only on loopback, behind a gate at that address that requires a
greeting (see ``greeting``) from each caller; a rank on another host connects through its own gate, on its own loopback.
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
"""Time in seconds in which a connection must complete its greeting."""
MAX_GREETING = 64
"""Number of connections that may be greeting at the same time."""
RETRY_S = 0.2
CHUNK_BYTES = 1 << 16

Way = Callable[[socket.socket], socket.socket | None]
"""Maps an incoming connection to the connection to join it with; None means hang up."""


class PrivateStore:
    """A store, with the gate that leads to it, if there is one."""

    def __init__(self, store: TCPStore, port: int, gate: Gate | None) -> None:
        self.store = store
        self.port = port
        """Port at which other processes reach the store; on a host that joined, the port of its gate."""
        self._gate = gate

    def close(self) -> None:
        """Cut all connections through the gate. A repeated call does nothing."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.close()


def open_store(host: str, port: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """Create a store that processes reach at ``host:port``, with ``secret`` also from other hosts.

    Args:
        host: an address of this host; the store listens at no other.
        port: 0 takes a free port.
        secret: None admits every process that reaches the address.
        timeout: timeout of the store's operations.

    Raises:
        OSError: the address does not belong to this host, or is taken.
    """
    listener = listening_socket(host, port)
    port = listener.getsockname()[1]
    if secret is None:
        return PrivateStore(_serve(host, listener, timeout), port, None)
    inner = listening_socket(LOOPBACK, 0)
    inner_port = inner.getsockname()[1]
    store = _serve(LOOPBACK, inner, timeout)
    greeter = Doorkeeper(secret)

    def way(connection: socket.socket) -> socket.socket | None:
        answer = greeter.answer(_read_exactly(connection, GREETING_BYTES, greeter.may_become_greeting))
        if answer is None:
            return None
        connection.sendall(answer)
        return socket.create_connection((LOOPBACK, inner_port))

    return PrivateStore(store, port, Gate(listener, way))


def join_store(host: str, port: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """Connect to a store that ``open_store`` created with the same secret.

    Raises:
        RuntimeError: the store cannot be reached in time, or the listener does not know the secret.
    """
    if secret is None:
        return PrivateStore(TCPStore(host, port, is_master=False, timeout=timeout), port, None)
    deadline = time.monotonic() + timeout.total_seconds()
    _connect_with_greeting(host, port, secret, deadline).close()  # detects errors here, where the message can be clear
    listener = listening_socket(LOOPBACK, 0)
    own_port = listener.getsockname()[1]

    def way(connection: socket.socket) -> socket.socket | None:
        return _connect_with_greeting(host, port, secret, time.monotonic() + timeout.total_seconds())

    gate = Gate(listener, way)
    try:
        return PrivateStore(TCPStore(LOOPBACK, own_port, is_master=False, timeout=timeout), own_port, gate)
    except BaseException:
        gate.close()
        raise


class Gate:
    """Joins every incoming connection with another one, in its own threads."""

    def __init__(self, listener: socket.socket, way: Way) -> None:
        self._listener = listener
        self._way = way
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._greeting_slots = threading.BoundedSemaphore(MAX_GREETING)
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
            except ConnectionError:  # the caller has already gone
                continue
            except OSError:
                if self._closed:
                    self._listener.close()
                    return
                time.sleep(RETRY_S)  # out of file descriptors, perhaps temporarily
                continue
            if not self._greeting_slots.acquire(blocking=False):
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
                    self._greeting_slots.release()
                if other is not None:
                    with other, self._known(other):
                        _carry(connection, other)
        except (OSError, RuntimeError):  # the connection ended, which both sides notice
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
    """Whether an address or host name can be reached only from its own host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_towards(host: str, port: int = 9) -> str:
    """Return this host's address on the route to another host; a loopback address for loopback.

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only chooses the interface
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address; None if no interface has it."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        table = Path("/proc/net/if_inet6")
        rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
        return next((row[5] for row in rows if ipaddress.IPv6Address(int(row[0], 16)) == wanted), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no address
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24]  # SIOCGIFADDR
                if ipaddress.IPv4Address(found) == wanted or (wanted.is_loopback and found[0] == 127):
                    return name
    return None


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a socket that listens at one address of this host.

    Raises:
        OSError: the address does not belong to this host, or the port is taken.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _serve(host: str, listener: socket.socket, timeout: timedelta) -> TCPStore:
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _connect_with_greeting(host: str, port: int, secret: str, deadline: float) -> socket.socket:
    """Return a connection to a gate after the greeting; retries until the gate listens and has a free place."""
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(left, 0.001))
        except OSError as error:
            if left <= RETRY_S:
                raise RuntimeError(f"the store at {host}:{port} cannot be reached: {error}") from error
        else:
            if _greet(connection, host, port, secret, left):
                return connection
            if deadline - time.monotonic() <= RETRY_S:
                raise RuntimeError(
                    f"the listener at {host}:{port} rejected every greeting: either it is another store with a"
                    " different"
                    f" secret, or {MAX_GREETING} idle connections keep it busy"
                )
        time.sleep(RETRY_S)


def _greet(connection: socket.socket, host: str, port: int, secret: str, left: float) -> bool:
    """Send the greeting. Returns False if the other end closes without an answer: wrong secret, or the gate is full."""
    try:
        caller = Caller(secret)
        connection.settimeout(max(left, 0.001))
        try:
            connection.sendall(caller.greeting)
            answer = _read_exactly(connection, ANSWER_BYTES)
        except ConnectionError:  # it closed before reading the greeting
            answer = b""
        if answer and not caller.accepts(answer):
            raise RuntimeError(f"the listener at {host}:{port} is not the expected store: it does not know the secret")
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise RuntimeError(f"the store at {host}:{port} did not let this process in: {error}") from error
        raise
    if not answer:
        connection.close()
    return bool(answer)


def _read_exactly(connection: socket.socket, size: int, goes_on: Callable[[bytes], bool] = lambda data: True) -> bytes:
    """Read up to ``size`` bytes; fewer if the other end closes or ``goes_on`` returns False.

    The connection's timeout applies to the whole read.
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
    """Copy data in both directions until one connection is closed."""
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
    """Shut down a connection or listener; the thread that waits on it then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
