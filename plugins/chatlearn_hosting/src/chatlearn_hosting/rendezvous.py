"""Where the ranks of a role meet, and at which addresses their process groups listen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from chatlearn_core.exceptions import BackendError
from chatlearn_hosting.engine_side.private_store import (
    LOOPBACK,
    PrivateStore,
    address_towards,
    interface_of,
    join_store,
    open_store,
)

WAIT = default_pg_timeout
"""How long ranks wait for each other, as torch has it."""
GLOO = "GLOO_SOCKET_IFNAME"


def make_default_group(
    backend: str, rendezvous: str, *, rank: int, world_size: int, secret: str | None = None
) -> PrivateStore | None:
    """``torch.distributed.init_process_group`` of a role's ranks, whose store and connections are theirs alone.

    Args:
        backend: such as ``gloo``, or ``cpu:gloo,cuda:nccl``.
        rendezvous: ``RoleContext.rendezvous``; what is not ``tcp://`` goes to torch as it is.
        rank: of this process.
        world_size: number of ranks.
        secret: ``RoleContext.rendezvous_secret``.

    Returns:
        The store, to be closed after the group was destroyed; None where torch made it.

    Raises:
        BackendError: the ranks cannot meet.
    """
    store: PrivateStore | None = None
    try:
        with group_interfaces(rendezvous):
            if rendezvous.startswith("tcp://"):
                store = meet(rendezvous, rank, secret, WAIT)
                dist.init_process_group(backend, store=store.store, rank=rank, world_size=world_size)
            else:
                dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        if store is not None:
            store.close()
        raise BackendError(f"rank {rank} of {world_size} could not meet the others at {rendezvous}: {error}") from error
    return store


def meet(rendezvous: str, rank: int, secret: str | None, timeout: timedelta) -> PrivateStore:
    """The store of a role's ranks: rank 0 makes it, at the rendezvous alone, the others join it.

    ``torch.distributed.init_process_group(init_method=rendezvous)`` would listen on every interface, for everybody.

    Args:
        rendezvous: ``tcp://host:port``, as in ``RoleContext.rendezvous``; the host is rank 0's.
        rank: of this process.
        secret: ``RoleContext.rendezvous_secret``.
        timeout: of the store's operations, and for rank 0 to come.

    Raises:
        BackendError: the address cannot be listened at, or not be reached in time.
    """
    address = urlsplit(rendezvous)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        raise BackendError(f"the rendezvous must be tcp://host:port, not {rendezvous!r}")
    try:
        if rank == 0:
            return open_store(address.hostname, address.port, secret, timeout)
        return join_store(address.hostname, address.port, secret, timeout)
    except (OSError, RuntimeError) as error:
        raise BackendError(f"rank {rank} could not meet the others at {rendezvous}: {error}") from error


@contextmanager
def group_interfaces(rendezvous: str | None) -> Iterator[None]:
    """Gloo's process groups that are made inside listen where the ranks can reach each other, and nowhere else.

    That is loopback for ranks on one host (``rendezvous`` on loopback, or None), and otherwise the interface towards
    the rendezvous. ``GLOO_SOCKET_IFNAME`` stands if it is set. NCCL reads its own variable once in a process, which may
    be in groups over several hosts too: where it listens is its own choice, or ``NCCL_SOCKET_IFNAME``'s.
    """
    host = urlsplit(rendezvous or "").hostname or LOOPBACK
    if os.environ.get(GLOO):
        yield
        return
    try:
        interface = interface_of(address_towards(host))
    except OSError:  # the meeting itself will tell
        interface = None
    if interface is None:
        yield
        return
    os.environ[GLOO] = interface
    try:
        yield
    finally:
        del os.environ[GLOO]
