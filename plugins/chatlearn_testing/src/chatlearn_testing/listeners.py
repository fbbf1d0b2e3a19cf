"""Lists the sockets on which processes listen. Linux only: it reads ``/proc``."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from chatlearn_testing.processes import command, descendants, open_files, read_proc

_TABLES = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""Socket table in ``/proc`` -> state code of a listening socket in it."""
LOOK_S = 0.25
"""Polling interval of ``listening_meanwhile``, seconds."""
_ACCEPTS = 0x10000
"""The flag ``__SO_ACCEPTCON`` of a listening unix socket."""


@dataclass(slots=True, frozen=True, order=True)
class Listener:
    """One socket that other processes can connect or send to."""

    process: int
    command: str
    kind: Literal["tcp", "udp", "unix"]
    address: str
    """IP address; for a unix socket its path, or ``@name`` in the abstract name space."""
    port: int = 0

    @property
    def socket(self) -> tuple[str, str, int]:
        """The socket without the process, because a forked process has its parent's sockets."""
        return self.kind, self.address, self.port

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can reach it."""
        if self.kind == "unix":
            return True
        address = ipaddress.ip_address(self.address)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback

    def __str__(self) -> str:
        place = self.address if self.kind == "unix" else f"{self.address} port {self.port}"
        return f"{self.kind} {place}, process {self.process}: {self.command[:200]}"


def family(process: int | None = None) -> set[int]:
    """Return a process (default: this one) and its living descendants."""
    leader = os.getpid() if process is None else process
    return {leader, *descendants(leader)}


def listeners(processes: Iterable[int]) -> set[Listener]:
    """Return all sockets on which these processes listen."""
    found: set[Listener] = set()
    for process in processes:
        inodes = {name[8:-1] for name in open_files(process) if name.startswith("socket:[")}
        text = command(process)
        for table, state in _TABLES.items():
            for line in read_proc(process, f"net/{table}").splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and fields[9] in inodes:
                    address, _, port = fields[1].rpartition(":")
                    kind: Literal["tcp", "udp"] = "tcp" if table.startswith("tcp") else "udp"
                    found.add(Listener(process, text, kind, _address(address), int(port, 16)))
        for line in read_proc(process, "net/unix").splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
                found.add(Listener(process, text, "unix", fields[7] if len(fields) > 7 else ""))
    return found


def tcp_ports(process: int) -> frozenset[int]:
    """Return the TCP ports on which a process listens."""
    return frozenset(listener.port for listener in listeners([process]) if listener.kind == "tcp")


@contextmanager
def listening_meanwhile() -> Iterator[set[Listener]]:
    """Collect the sockets that this process and its descendants open for listening inside the ``with``.

    The yielded set grows every ``LOOK_S`` seconds and is complete after the ``with``. A socket that is open for less
    than that may be missed. One that was open before stays left out when a forked process inherits it.
    """
    before = {listener.socket for listener in listeners(family())}
    found: set[Listener] = set()
    over = threading.Event()

    def opened() -> set[Listener]:
        return {listener for listener in listeners(family()) if listener.socket not in before}

    def look() -> None:
        while not over.wait(LOOK_S):
            found.update(opened())

    watcher = threading.Thread(target=look, name="listeners", daemon=True)
    watcher.start()
    try:
        yield found
        found.update(opened())
    finally:
        over.set()
        watcher.join()


def reached_from_outside(found: Iterable[Listener]) -> list[str]:
    """Select the sockets that processes on other hosts can reach, as sorted texts."""
    return sorted(str(listener) for listener in found if not listener.is_local)


def _address(hexadecimal: str) -> str:
    """Parse an address as the kernel prints it: 32-bit words in the host's byte order."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
