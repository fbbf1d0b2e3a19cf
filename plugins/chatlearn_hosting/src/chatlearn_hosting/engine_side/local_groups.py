"""Restricts the process groups of a single-host engine to loopback. Needs torch and the standard library.

The workers of an engine rendezvous at ``tcp://127.0.0.1:port``, but torch's store still listens on every interface, and
gloo listens at the address of the host's name. All workers are on one host, so loopback suffices for both.
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
    """Make stores for a loopback address listen only on loopback from now on. A repeated call does nothing.

    torch 2.13 has no setting for this: ``torch.distributed.rendezvous`` creates its store through the name
    ``TCPStore``, which this function replaces by a function that passes a listening socket. Other addresses are
    unaffected.

    Raises:
        RuntimeError: this torch creates its stores in another way.
    """
    # ``torch.distributed.rendezvous`` as an attribute is a function, so import the module by name.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    original: Any = getattr(rendezvous, "TCPStore", None)
    if original is None or not hasattr(rendezvous, "_create_c10d_store"):
        raise RuntimeError("torch.distributed.rendezvous no longer creates a TCPStore; see local_groups.py")
    if getattr(original, _OURS, False):
        return

    def make(*args: Any, **kwargs: Any) -> Any:
        host = kwargs.get("host_name")
        if args or not kwargs.get("is_master") or "master_listen_fd" in kwargs or not is_loopback(str(host)):
            return original(*args, **kwargs)
        listener = listening_socket(LOOPBACK if host == "localhost" else str(host), kwargs["port"])
        # A multi-tenant store (shared by users of one port in a process) accepts no socket.
        kwargs = kwargs | {"port": listener.getsockname()[1], "multi_tenant": False}
        return original(**kwargs, master_listen_fd=listener.detach())

    setattr(make, _OURS, True)
    rendezvous.TCPStore = make


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make gloo groups created inside, and in processes started inside, listen on loopback.

    A user's ``GLOO_SOCKET_IFNAME`` takes precedence.
    """
    if os.environ.get(GLOO):
        yield
        return
    os.environ[GLOO] = LOOPBACK_INTERFACE
    try:
        yield
    finally:
        del os.environ[GLOO]
