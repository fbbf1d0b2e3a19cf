from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from chatlearn_testing.listeners import Listener, family, listeners, listening_meanwhile, reached_from_outside


@pytest.mark.parametrize(
    ("kind", "host", "local"),
    [("tcp", "127.0.0.1", True), ("tcp", "0.0.0.0", False), ("tcp", "::1", True), ("tcp", "::", False)],
)
def test_a_listening_port_is_found_with_its_address(kind, host, local) -> None:
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = server.getsockname()[1]
    with server:
        [found] = [one for one in listeners([os.getpid()]) if one.port == port]
    assert (found.kind, found.address, found.is_local, found.process) == (kind, host, local, os.getpid())
    assert not [one for one in listeners([os.getpid()]) if one.port == port]


def test_unix_and_datagram_sockets_are_found(tmp_path) -> None:
    name = f"\0chatlearn-test-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        abstract.bind(name)
        abstract.listen()
        named.bind(str(tmp_path / "s"))
        named.listen()
        datagrams.bind(("0.0.0.0", 0))
        found = listeners([os.getpid()])
    assert {one.address for one in found if one.kind == "unix"} >= {f"@{name[1:]}", str(tmp_path / "s")}
    assert all(one.is_local for one in found if one.kind == "unix")
    assert [one for one in found if one.kind == "udp" and not one.is_local]


def test_connections_are_no_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ports = {one.port for one in listeners([os.getpid()])}
        assert server.getsockname()[1] in ports
        assert client.getsockname()[1] not in ports


def test_children_belong_to_the_family() -> None:
    script = (
        "import socket,sys; s=socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        [found] = [one for one in listeners(family()) if one.port == port]
        assert found.process == child.pid
        assert "create_server" in found.command
    finally:
        child.communicate("\n")


def test_an_address_that_is_mapped_into_ipv6_counts_as_what_it_is() -> None:
    assert Listener(1, "", "tcp", "::ffff:127.0.0.1", 5).is_local
    assert not Listener(1, "", "tcp", "::ffff:0.0.0.0", 5).is_local


def test_what_listens_for_a_while_is_seen(monkeypatch) -> None:
    monkeypatch.setattr("chatlearn_testing.listeners.LOOK_S", 0.01)
    with socket.create_server(("0.0.0.0", 0)) as before, listening_meanwhile() as found:
        with socket.create_server(("0.0.0.0", 0)) as server:
            port = server.getsockname()[1]
            deadline = time.monotonic() + 30
            while not found and time.monotonic() < deadline:
                time.sleep(0.01)
        assert before.getsockname()[1] != port
    assert {one.port for one in found} == {port}
    [text] = reached_from_outside(found)
    assert f"tcp 0.0.0.0 port {port}, process {os.getpid()}" in text


def test_a_socket_that_a_child_inherits_is_not_new(monkeypatch) -> None:
    """Between fork and exec every child has its parent's sockets."""
    monkeypatch.setattr("chatlearn_testing.listeners.LOOK_S", 0.01)
    with socket.create_server(("0.0.0.0", 0)) as before, listening_meanwhile() as found:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(before.fileno(),))
        assert {one.process for one in listeners(family()) if one.port == before.getsockname()[1]} >= {child.pid}
        time.sleep(0.1)
        child.communicate(b"\n")
    assert not found
