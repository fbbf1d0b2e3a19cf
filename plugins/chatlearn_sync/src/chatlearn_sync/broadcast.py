"""Transport ``broadcast``: process groups of ``torch.distributed``, over any distance.

Each trainer rank that owns weights is rank 0 of a group of its own, whose other ranks are all receiving processes: with
several owners the groups work at the same time. A receiving process is the engine's own (channel ``process_group``), or
the adapter's (channel ``tensors``). Tensors travel flattened, a bucket a broadcast, while the next bucket is gathered
and the one before is loaded. Groups outlive a sync; one is formed anew when its members changed or a sync failed.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch import Tensor

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import Trainer
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_hosting.engine_side.groups import SenderGroup
from chatlearn_hosting.engine_side.private_store import LOOPBACK, PrivateStore, open_store
from chatlearn_sync.addresses import listening_host
from chatlearn_sync.arrival import GLANCE_S, Arrival
from chatlearn_sync.flat_buffers import FlatBuffers, flat_limit, pack, wider_first
from chatlearn_sync.gpus import shared_gpu, visible_gpus
from chatlearn_sync.hub import Hub
from chatlearn_sync.messages import Message, store_secret
from chatlearn_sync.open_hubs import OpenHubs
from chatlearn_sync.options import BroadcastOptions
from chatlearn_sync.shard_spec import ShardSpec
from chatlearn_sync.stream import (
    Bucket,
    StreamCheck,
    buckets,
    describe,
    describe_endpoint,
    num_bytes,
    stream,
)

log = logging.getLogger(__name__)

NAME = "broadcast"
Backend = Literal["gloo", "nccl"]
ALONE_BYTES = 4 << 20
"""Tensors of at least this size are sent alone from their own memory; packing them would cost more, bytes."""
LAST_BUCKET_S = 1.0
"""Time that a failed sender waits for buckets in flight, seconds."""


Running = dict[int, tuple[int, Arrival]]
"""Buffer -> number of the bucket being sent from it, and its broadcast."""


@dataclass(slots=True, eq=False)
class Membership:
    """A formed group and its members."""

    group: SenderGroup
    store: PrivateStore
    receivers: tuple[Endpoint, ...]
    terms: tuple[str, str]
    """Channel and backend."""


class BroadcastSender:
    """Packs this rank's tensors into flat buffers and broadcasts them."""

    def __init__(self, options: BroadcastOptions, endpoint: Endpoint) -> None:
        self._options = options
        self._endpoint = endpoint
        self._hubs = OpenHubs(NAME, endpoint)
        self._member: Membership | None = None
        self._buffers: FlatBuffers | None = None
        self._said: str | None = None
        """Logged reason for not using NCCL."""

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Listen for the receivers.

        Raises:
            WeightSyncError: this host has no address that the receivers reach.
        """
        host = listening_host(plan, self._endpoint, self._options.host)
        return self._hubs.open(plan, host, collective=True)

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Stream this rank's tensors; returns after every receiver loaded all of them. Bytes are counted once."""
        hub = self._hubs.of(plan)
        running: Running = {}
        try:
            with hub.sending():
                try:
                    return self._send(plan, trainer, hub, running)
                except Exception:
                    _let_finish([arrival for _, arrival in running.values()])
                    raise
        except BaseException:
            self._leave()  # the progress of the other ranks is unknown
            raise

    def _send(self, plan: SyncRequest, trainer: Trainer, hub: Hub, running: Running) -> int:
        where = f"{describe(plan, NAME)}, sender {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        limit = flat_limit(plan, self._options.slot_mb << 20)
        hub.wait_connected()
        backend = self._backend(plan, hub, where)
        device = self._endpoint.device if backend == "nccl" else "cpu"
        if self._buffers is None or not self._buffers.fits(limit, device):
            self._buffers = FlatBuffers(limit, device)
        number = sent = 0
        boxes = plan.export == "boxes"
        shards = stream(plan, trainer)
        for bucket in buckets(shards, self._endpoint.rank, check, limit, boxes=boxes, alone_bytes=ALONE_BYTES):
            hub.check()
            if number == 0:
                self._form(plan, hub, backend, where)
            slot = self._buffers.slot(number, num_bytes(bucket))
            if slot in running:
                self._finish(*running.pop(slot), hub, where)
            flat = self._fill(bucket, slot, number, hub)
            assert self._member is not None
            running[slot] = (number, Arrival(self._member.group, flat, hub.nudge))
            sent += num_bytes(bucket)
            number += 1
            del bucket, flat  # lets memory gathered for the bucket be freed once it is sent
        for pending, arrival in running.values():
            self._finish(pending, arrival, hub, where)
        hub.end(number)
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Close the control path; a receiver or a send still in progress raises. The group stays."""
        self._hubs.release(plan)

    def close(self) -> None:
        """Leave the group and close every control path."""
        self._hubs.close()
        self._leave()
        self._buffers = None

    def _backend(self, plan: SyncRequest, hub: Hub, where: str) -> Backend:
        """The backend chosen by ``backend_of``, or gloo if two ends share a GPU.

        Raises:
            WeightSyncError: two ends share a GPU, and the options require NCCL.
        """
        backend = backend_of(plan, self._options)
        if backend == "gloo":
            return backend
        mine = (self._endpoint.host, visible_gpus(self._endpoint.device))
        shared = shared_gpu([mine, *((peer.endpoint.host, peer.hello["gpus"]) for peer in hub.live)])
        if shared is None:
            return backend
        reason = f"two ends of its process group are on {shared}, where NCCL takes one process"
        if self._options.backend == "nccl":
            raise WeightSyncError(
                f"{where}: {reason}. Set weight_sync.options.backend to gloo or auto, or weight_sync.backend to "
                "cuda_ipc, or place them apart"
            )
        if self._said != reason:
            log.warning("%s: gloo instead of nccl: %s; weight_sync.backend cuda_ipc is faster here", where, reason)
            self._said = reason
        return "gloo"

    def _fill(self, bucket: Bucket, slot: int, number: int, hub: Hub) -> Tensor:
        """Copy a bucket into contiguous memory and announce it."""
        assert self._buffers is not None
        ordered = wider_first(list(bucket))
        verifies = self._options.verify_checksums
        flat = self._buffers.as_it_lies(ordered)
        if flat is not None:
            checksums = [checksum(flat)] if verifies else None
        else:
            flat = self._buffers.get(slot, num_bytes(bucket))
            checksums = pack(ordered, flat, with_checksums=verifies)
        announcement: Message = {
            "bucket": number,
            "num_bytes": flat.numel(),
            "tensors": [ShardSpec.of(shard).to_json() for shard in ordered],
            "checksums": checksums,
        }
        hub.say(announcement)
        return flat

    def _finish(self, number: int, arrival: Arrival, hub: Hub, where: str) -> None:
        """Wait for a broadcast to end while watching the control path, because a lost receiver would block it."""
        while not arrival.is_over:
            hub.check(arrival.glance_s)
        try:
            arrival.wait()
        except RuntimeError as error:
            hub.check()
            raise BackendTimeoutError(
                f"{where}: the broadcast of bucket {number} failed: {error}. Receivers that did not take it: "
                f"{hub.behind(number)}"
            ) from error

    def _form(self, plan: SyncRequest, hub: Hub, backend: Backend, where: str) -> None:
        """Form a group of exactly the plan's receivers."""
        terms = (plan.channel, backend)
        peers = hub.live
        member = self._member
        if (
            member is not None
            and (member.receivers, member.terms) == (plan.receivers, terms)
            and all(member.group.name in peer.hello["groups"] for peer in peers)
        ):
            return
        self._leave()
        limit = timedelta(seconds=plan.timeout_s)
        host = hub.address.host if hub.address.family == "tcp" else LOOPBACK
        try:
            store = open_store(host, 0, store_secret(hub.address), limit)
        except OSError as error:
            raise WeightSyncError(f"{where}: cannot listen at {host!r}: {error}") from error
        name = f"chatlearn-{self._endpoint.role}-{self._endpoint.rank}-{secrets.token_hex(6)}"
        world_size = 1 + sum(int(peer.hello["ranks"]) for peer in peers)
        first_rank = 1
        for peer in peers:
            rendezvous: Message = {
                "join": name,
                "address": f"{host}:{store.port}",
                "backend": backend,
                "world_size": world_size,
                "first_rank": first_rank,
            }
            hub.say_to(peer, rendezvous)
            first_rank += int(peer.hello["ranks"])
        try:
            group = SenderGroup(
                store.store, name, backend, world_size, 0, plan.timeout_s, host=host, on_close=store.close
            )
        except RuntimeError as error:
            store.close()
            hub.check()
            raise BackendTimeoutError(
                f"{where}: its process group of {world_size} did not form within {plan.timeout_s:g} s "
                f"(weight_sync.timeout_s); it waited for {hub.behind(0)}: {error}"
            ) from error
        self._member = Membership(group, store, plan.receivers, terms)

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            with contextlib.suppress(RuntimeError):  # it is broken already, which is why it is left
                member.group.close()


def _let_finish(arrivals: Sequence[Arrival]) -> None:
    """Wait for broadcasts in flight after the sender failed, so that receivers get the sender's error rather than that
    of a broken connection.
    """
    deadline = time.monotonic() + LAST_BUCKET_S
    while time.monotonic() < deadline and not all(arrival.is_over for arrival in arrivals):
        time.sleep(GLANCE_S)


def backend_of(plan: SyncRequest, options: BroadcastOptions) -> Backend:
    """``nccl`` if every end is on a GPU, unless the options say otherwise."""
    if options.backend != "auto":
        return options.backend
    ends = (*plan.senders, *plan.receivers)
    return "nccl" if all(end.device.startswith("cuda") for end in ends) else "gloo"
