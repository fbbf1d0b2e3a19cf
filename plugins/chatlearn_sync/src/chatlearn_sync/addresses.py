"""Addresses under which the ends of a sync reach a sender's host."""

from __future__ import annotations

import contextlib
import socket

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import Endpoint, SyncRequest


def listening_host(plan: SyncRequest, sender: Endpoint, configured: str | None) -> str | None:
    """Where a sender listens: None (a Unix socket) if all receivers are on its host, else an address they can reach.

    Raises:
        WeightSyncError: this host's own address cannot be found.
    """
    if configured is not None:
        return configured
    remote = [receiver.host for receiver in plan.receivers if receiver.host != sender.host]
    return address_towards(remote[0]) if remote else None


def address_towards(host: str) -> str:
    """The address of this host on the way to another.

    Raises:
        WeightSyncError: neither that host's name nor this one's can be resolved.
    """
    for name in (host, socket.gethostname()):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing: it only chooses the interface
            return str(probe.getsockname()[0])
    raise WeightSyncError(
        f"this host finds no address under which {host!r} can reach it: neither name can be resolved. Set "
        "weight_sync.options.host to an address of the trainer's host, or correct the name service"
    )


def bound_socket(host: str) -> socket.socket:
    """A socket that listens on a free port of one address of this host, and on no other interface.

    Raises:
        WeightSyncError: the address does not belong to this host.
    """
    try:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise WeightSyncError(
            f"this host cannot listen at {host!r}: {error}. Set weight_sync.options.host to an address of the "
            "trainer's host that the generators reach"
        ) from error
