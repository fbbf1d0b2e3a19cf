"""Keeps the process groups of an engine on one host to itself. Needs torch and the standard library.

An engine's workers meet at ``tcp://127.0.0.1:port``, and torch's store listens on every interface all the same; gloo
listens where the host's name points to. The workers of an engine are on one host, so loopback does for both.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .private_store import LOOPBACK, is_loopback, listening_socket

GLOO = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE = "lo"
_OURS = "_chatlearn_keeps_loopback"


def keep_local_stores_local() -> None:
    """From now on a store that ``init_process_group`` makes for an address on loopback listens there alone.

    torch 2.13 offers no setting for it: ``torch.distributed.rendezvous`` makes its store by the name ``TCPStore``,
    which is replaced by a function that hands it a listening socket. Addresses beyond loopback are left as they are.
    Twice is fine.

    Raises:
        RuntimeError: this torch makes its stores in another way.
    """
    # The package has a function of the module's name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original: Any = getattr(rendezvous, "TCPStore", None)
    if original is None or not hasattr(rendezvous, "_create_c10d_store"):
        raise RuntimeError("torch.distributed.rendezvous does not make a TCPStore any more; see local_groups.py")
    if getattr(original, _OURS, False):
        return

    def make(*args: Any, **kwargs: Any) -> Any:
        host = kwargs.get("host_name")
        if args or not kwargs.get("is_master") or "master_listen_fd" in kwargs or not is_loopback(str(host)):
            return original(*args, **kwargs)
        listener = listening_socket(LOOPBACK if host == "localhost" else str(host), kwargs["port"])
        # Shared by those who ask for one port in one process, a store of several tenants takes no socket.
        kwargs = kwargs | {"port": listener.getsockname()[1], "multi_tenant": False}
        return original(**kwargs, master_listen_fd=listener.detach())

    setattr(make, _OURS, True)
    rendezvous.TCPStore = make


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Gloo's groups that are made inside, and in processes started inside, listen on loopback, unless the user said
    where (``GLOO_SOCKET_IFNAME``).
    """
    if os.environ.get(GLOO):
        yield
        return
    os.environ[GLOO] = LOOPBACK_INTERFACE
    try:
        yield
    finally:
        del os.environ[GLOO]
