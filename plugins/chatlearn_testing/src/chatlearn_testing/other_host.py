"""Makes a process one that could be on another host: it shares the network and the disk with this one, but no memory.

Linux only; the kernel must allow user namespaces.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from chatlearn_testing.leftovers import SHARED_MEMORY

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def leave_host() -> None:
    """Give the calling process, which must have one thread, an empty /dev/shm and System V memory of its own, and no
    Unix sockets to connect to.

    Raises:
        OSError: the kernel does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny", encoding="ascii")
    (own / "uid_map").write_text(f"0 {user} 1", encoding="ascii")
    (own / "gid_map").write_text(f"0 {group} 1", encoding="ascii")
    _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount")
    _check(libc.mount(b"tmpfs", os.fsencode(SHARED_MEMORY), b"tmpfs", 0, None), "mount")
    sys.addaudithook(_refuse_unix_sockets)


def _refuse_unix_sockets(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.connect" and isinstance(arguments[1], str | bytes):
        raise ConnectionRefusedError(f"the Unix socket {arguments[1]!r} belongs to another host")


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
