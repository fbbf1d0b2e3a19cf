from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from chatlearn_hosting.engine_side.greeting import ANSWER_BYTES, MARK, Caller
from chatlearn_hosting.engine_side.private_store import (
    LOOPBACK,
    MAX_GREETING,
    PrivateStore,
    address_towards,
    interface_of,
    is_loopback,
    join_store,
    open_store,
)
from chatlearn_hosting.reserved_port import ReservedPort

LIMIT = timedelta(seconds=10)
SECRETS = pytest.mark.parametrize("secret", [None, "secret"])


@contextmanager
def opened(secret: str | None, host: str = LOOPBACK, port: int = 0) -> Iterator[PrivateStore]:
    store = open_store(host, port, secret, LIMIT)
    try:
        yield store
    finally:
        store.close()


def listening(port: int) -> set[str]:
    """Addresses at which something listens at a port, in the kernel's writing."""
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


@SECRETS
def test_ranks_meet(secret) -> None:
    with opened(secret) as mine:
        mine.store.set("a", "1")
        theirs = join_store(LOOPBACK, mine.port, secret, LIMIT)
        assert theirs.store.get("a") == b"1"
        theirs.store.set("b", "2")
        assert mine.store.get("b") == b"2"
        again = theirs.store.clone()  # process groups do this
        assert again.add("n", 3) == 3
        theirs.close()
        theirs.close()


@SECRETS
def test_a_process_group_forms(secret) -> None:
    """Both in this process, so that a gate in Python must work while the other side waits in C++."""
    with opened(secret) as mine:
        theirs = join_store(LOOPBACK, mine.port, secret, LIMIT)
        groups = {}

        def form(rank: int, store) -> None:
            groups[rank] = dist.ProcessGroupGloo(PrefixStore("g", store), rank, 2, timeout=LIMIT)

        threads = [threading.Thread(target=form, args=pair) for pair in ((0, mine.store), (1, theirs.store))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert groups.keys() == {0, 1}
        theirs.close()


@SECRETS
def test_it_listens_at_one_address_alone(secret) -> None:
    with opened(secret, "127.0.0.2") as mine:
        assert listening(mine.port) == {"0200007F"}
        assert join_store("127.0.0.2", mine.port, secret, LIMIT).store.add("n", 1) == 1


@SECRETS
def test_a_reserved_port_can_be_taken(secret) -> None:
    with ReservedPort() as port, opened(secret, port=port.number) as mine:
        assert mine.port == port.number
        assert listening(port.number) == {"0100007F"}


def test_unknown_callers_get_nothing_and_do_no_harm() -> None:
    with opened("secret") as mine, ExitStack() as stack:
        for noise in (b"GET / HTTP/1.0\r\n\r\n", Caller("guessed").greeting, b"\xff" * 100_000):
            connection = stack.enter_context(socket.create_connection((LOOPBACK, mine.port), timeout=10))
            with suppress(ConnectionError):
                connection.sendall(noise)
                assert connection.recv(1) == b""
        silent = stack.enter_context(socket.create_connection((LOOPBACK, mine.port)))
        silent.sendall(MARK)
        theirs = join_store(LOOPBACK, mine.port, "secret", LIMIT)
        theirs.store.set("a", "1")
        assert mine.store.get("a") == b"1"
        theirs.close()


def test_silent_connections_are_limited() -> None:
    with opened("secret") as mine, ExitStack() as stack:
        for _ in range(MAX_GREETING + 8):
            last = stack.enter_context(socket.create_connection((LOOPBACK, mine.port), timeout=10))
        assert last.recv(1) == b"", "it is hung up on"


def test_a_caller_rejected_by_a_full_gate_tries_again() -> None:
    with opened("secret") as mine, ExitStack() as strangers:
        for _ in range(MAX_GREETING + 1):
            last = strangers.enter_context(socket.create_connection((LOOPBACK, mine.port), timeout=10))
        assert last.recv(1) == b"", "it is full"
        room = threading.Timer(0.3, strangers.close)
        room.start()
        theirs = join_store(LOOPBACK, mine.port, "secret", LIMIT)
        assert theirs.store.add("n", 1) == 1
        theirs.close()
        room.join()


def test_a_wrong_secret_is_reported() -> None:
    with opened("secret") as mine, pytest.raises(RuntimeError, match="rejected every greeting"):
        join_store(LOOPBACK, mine.port, "guessed", timedelta(seconds=3))


def test_another_listener_on_the_store_s_port_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(bytes(ANSWER_BYTES))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RuntimeError, match="does not know the secret"):
            join_store(LOOPBACK, listener.getsockname()[1], "secret", LIMIT)
        thread.join()


def test_a_missing_store_is_reported() -> None:
    with ReservedPort() as port, pytest.raises(RuntimeError, match="cannot be reached"):
        join_store(LOOPBACK, port.number, "secret", timedelta(seconds=0.3))


def test_closing_ends_the_gate() -> None:
    with opened("secret") as mine:
        theirs = join_store(LOOPBACK, mine.port, "secret", timedelta(seconds=1))
        theirs.store.set("a", "1")
        mine.close()
        with pytest.raises(RuntimeError):
            theirs.store.add("n", 1)
        theirs.close()


def test_addresses_and_interfaces() -> None:
    assert is_loopback("127.0.0.9")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("192.0.2.1")
    assert address_towards(LOOPBACK) == LOOPBACK
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("192.0.2.255") is None
