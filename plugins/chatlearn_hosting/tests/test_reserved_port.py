from __future__ import annotations

import socket
import struct
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from chatlearn_hosting.reserved_port import ReservedPort, reserved_row

IP_LOCAL_PORT_RANGE = 51
"""Of Linux 6.3 and later: between which ports the kernel chooses for one socket (``linux/in.h``)."""


def choose_only(chooser: socket.socket, port: int) -> None:
    """Leave the kernel one port that it may give this socket by itself."""
    try:
        chooser.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
    except OSError:
        pytest.skip("this kernel cannot be told which port to choose (Linux 6.3 can)")


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_the_kernel_gives_a_reserved_port_to_no_other_socket(host: str) -> None:
    with ReservedPort() as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        choose_only(other, port.number)
        with pytest.raises(OSError, match="Address already in use"):
            other.bind((host, 0))
    with socket.socket() as other:
        choose_only(other, port.number)
        other.bind((host, 0))
        assert other.getsockname()[1] == port.number, "closing gives it back"


def test_the_kernel_gives_a_reserved_port_to_no_connection() -> None:
    with socket.socket() as server, socket.socket() as client, ReservedPort() as port:
        server.bind(("127.0.0.1", 0))
        server.listen()
        choose_only(client, port.number)
        with pytest.raises(OSError, match="Cannot assign requested address"):
            client.connect(server.getsockname())


def test_a_store_listens_at_a_reserved_port_and_stays_when_it_is_given_up() -> None:
    with ReservedPort() as port:
        store = TCPStore("127.0.0.1", port.number, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", port.number, is_master=False, timeout=timedelta(seconds=20))
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_two_reserved_ports_differ() -> None:
    with ReservedPort() as one, ReservedPort() as two:
        assert one.number != two.number


def test_a_certain_port_has_one_holder() -> None:
    with ReservedPort() as port, pytest.raises(OSError, match="Address already in use"):
        ReservedPort(port.number)


def test_a_store_listens_at_every_port_of_a_row() -> None:
    with reserved_row(3) as first:
        stores = [TCPStore("127.0.0.1", first + offset, is_master=True, wait_for_workers=False) for offset in range(3)]
    assert [store.port for store in stores] == [first, first + 1, first + 2]


def test_a_row_passes_over_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_row(2) as taken, ReservedPort() as free:
        offered = [ReservedPort(), free]
        offered[0].close()
        offered[0].number = taken
        made = iter(offered)
        monkeypatch.setattr(
            "chatlearn_hosting.reserved_port.ReservedPort",
            lambda number=0: ReservedPort(number) if number else next(made),
        )
        with reserved_row(2) as first:
            assert first == free.number
