"""A sync over several hosts in which no byte leaves its host: each receiver gets everything from senders on its host.

Every sender has every whole tensor, because the ranks gather them together. On each host without a tensor's owner,
another sender sends that tensor to the receivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import Endpoint, SyncRequest
from chatlearn_sync.messages import ControlOffer
from chatlearn_sync.stream import describe, describe_endpoint

REMEDY = "set weight_sync.backend to a transport that reaches further, such as 'broadcast', or to 'auto'"


def on_host_of(sender: Endpoint, plan: SyncRequest, transport: str) -> SyncRequest:
    """The part of a sync on this sender's host: the ends there, including the sender.

    Raises:
        WeightSyncError: a receiver, here or elsewhere, has no sender on its host; names it.
    """
    hosts = {end.host for end in (*plan.senders, sender)}
    for receiver in plan.receivers:
        if receiver.host not in hosts:
            raise WeightSyncError(
                f"{describe(plan, transport)}: sender {describe_endpoint(sender)} and receiver "
                f"{describe_endpoint(receiver)} do not share a host, and no other sender is on "
                f"{receiver.host}; {REMEDY}"
            )
        if plan.export == "boxes" and receiver.host != sender.host:
            raise WeightSyncError(
                f"{describe(plan, transport)}: the boxes of sender {describe_endpoint(sender)} do not reach receiver "
                f"{describe_endpoint(receiver)} on another host; {REMEDY}, or set weight_sync.export to full_tensors"
            )
    return replace(
        plan,
        senders=tuple(end for end in plan.senders if end.host == sender.host),
        receivers=tuple(end for end in plan.receivers if end.host == sender.host),
    )


def ranks_sent_by(sender: Endpoint, plan: SyncRequest) -> frozenset[int]:
    """The ranks whose tensors this sender sends to the receivers on its host: its own, and its share of those of ranks
    on other hosts.
    """
    here = sorted(end.rank for end in plan.senders if end.host == sender.host)
    elsewhere = sorted(end.rank for end in plan.senders if end.host != sender.host)
    share = {rank for number, rank in enumerate(elsewhere) if here and here[number % len(here)] == sender.rank}
    return frozenset({sender.rank, *share})


def offers_here(offers: Sequence[ControlOffer], receiver: Endpoint) -> list[ControlOffer]:
    """The offers of the senders on a receiver's host."""
    return [offer for offer in offers if offer.sender.host == receiver.host]
