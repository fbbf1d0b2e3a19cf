"""Which sockets processes listen at: what others can connect to. Linux only: it reads ``/proc``."""

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
"""Tables of sockets, and the state of one that takes what comes from anywhere."""
LOOK_S = 0.25
_ACCEPTS = 0x10000
"""``__SO_ACCEPTCON``: a unix socket that listens."""


@dataclass(slots=True, frozen=True, order=True)
class Listener:
    """One socket that others can connect or send to."""

    process: int
    command: str
    kind: Literal["tcp", "udp", "unix"]
    address: str
    """An IP address; of a unix socket its path, or ``@name`` in the abstract name space."""
    port: int = 0

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
    """A process (this one) and all that it started and that are its descendants still."""
    leader = os.getpid() if process is None else process
    return {leader, *descendants(leader)}


def listeners(processes: Iterable[int]) -> set[Listener]:
    """All sockets that these processes listen at."""
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
    """The TCP ports that a process listens on."""
    return frozenset(listener.port for listener in listeners([process]) if listener.kind == "tcp")


@contextmanager
def listening_meanwhile() -> Iterator[set[Listener]]:
    """The sockets that this process and its descendants listen at inside, those that were there before left out.

    The set grows as they are seen, every ``LOOK_S``, and is complete after the last look, at the end.
    """
    before = listeners(family())
    found: set[Listener] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            found.update(listeners(family()) - before)

    watcher = threading.Thread(target=look, name="listeners", daemon=True)
    watcher.start()
    try:
        yield found
        found.update(listeners(family()) - before)
    finally:
        over.set()
        watcher.join()


def reached_from_outside(found: Iterable[Listener]) -> list[str]:
    """Those that processes of other hosts can reach."""
    return sorted(str(listener) for listener in found if not listener.is_local)


def _address(hexadecimal: str) -> str:
    """The kernel writes addresses as words in the byte order of the machine."""
    words = [bytes.fromhex(hexadecimal[at : at + 8])[::-1] for at in range(0, len(hexadecimal), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
