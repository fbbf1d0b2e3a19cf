"""Transport ``direct``: trainer and generator share a process, and the generator reads the trainer's own tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import Trainer, WeightLoader
from chatlearn_core.types import Endpoint, SyncOffer, SyncRequest
from chatlearn_sync.channel import Channel
from chatlearn_sync.options import DirectOptions
from chatlearn_sync.stream import (
    Bucket,
    StreamCheck,
    bucket_limit,
    buckets,
    describe,
    describe_endpoint,
    num_bytes,
    stream,
)

REMEDY = "set weight_sync.backend to a transport that reaches further, such as 'checkpoint', or to 'auto'"


@dataclass(slots=True, eq=False)
class DirectOffer:
    """The sender's channel. Pickling drops the channel, so a receiver in another process gets None and raises."""

    sender: Endpoint
    channel: Channel | None

    def __reduce__(self) -> tuple[Any, ...]:
        return (DirectOffer, (self.sender, None))


class DirectSender:
    """Streams whole tensors into the channel, bucket by bucket, and holds each bucket until it is acknowledged."""

    def __init__(self, options: DirectOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channels: dict[str, Channel] = {}

    def offer(self, plan: SyncRequest) -> SyncOffer:
        """Open the channel.

        Raises:
            WeightSyncError: a receiver is in another process.
        """
        for receiver in plan.receivers:
            if (receiver.host, receiver.process) != (self._endpoint.host, self._endpoint.process):
                raise WeightSyncError(
                    f"{describe(plan, 'direct')}: sender {describe_endpoint(self._endpoint)} and receiver "
                    f"{describe_endpoint(receiver)} do not share a process; {REMEDY}"
                )
        self.release(plan)
        channel = Channel(plan, self._endpoint)
        self._channels[plan.sync_id] = channel
        return SyncOffer(self._endpoint.rank, DirectOffer(self._endpoint, channel))

    def send(self, plan: SyncRequest, trainer: Trainer) -> int:
        """Stream this rank's tensors; returns after every receiver loaded all of them. Bytes are counted once."""
        channel = self._channels.get(plan.sync_id)
        if channel is None:
            raise WeightSyncError(f"{describe(plan, 'direct')}: send was called without an open offer")
        where = f"{describe(plan, 'direct')}, sender {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        sent = 0
        try:
            for bucket in buckets(stream(plan, trainer), self._endpoint.rank, check, bucket_limit(plan)):
                for device in {shard.tensor.device for shard in bucket if shard.tensor.is_cuda}:
                    torch.cuda.synchronize(device)  # the engine may read on a stream of its own
                channel.put(bucket)
                sent += num_bytes(bucket)
                del bucket  # the channel holds it until it is acknowledged, and no longer
            channel.put("end")
            channel.drain()
        except BaseException as error:
            channel.fail(error)
            raise
        return sent

    def release(self, plan: SyncRequest) -> None:
        """Close the channel; a receiver or a send still in progress raises."""
        channel = self._channels.pop(plan.sync_id, None)
        if channel is not None:
            channel.fail(WeightSyncError("the sync was released"))

    def close(self) -> None:
        """Close every open channel."""
        while self._channels:
            _, channel = self._channels.popitem()
            channel.fail(WeightSyncError("the sender was closed"))


class DirectReceiver:
    """Takes buckets from all sender ranks in order of arrival, so that no rank's stream waits for another's."""

    def __init__(self, options: DirectOptions, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def receive(self, plan: SyncRequest, offers: Sequence[SyncOffer], loader: WeightLoader) -> int:
        """Load every bucket with ``loader.load_tensors``; returns the number of bytes. The event loop stays free."""
        open_channels = [self._channel(plan, offer) for offer in offers]
        where = f"{describe(plan, 'direct')}, receiver {describe_endpoint(self._endpoint)}"
        check = StreamCheck(plan.manifest, where)
        finished: list[Channel] = []
        received = 0
        news = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        try:
            for channel in open_channels:
                channel.attach(self._endpoint, wake)
            while open_channels:
                news.clear()
                progress = False
                for channel in list(open_channels):
                    item = channel.poll(self._endpoint)
                    if item is None:
                        continue
                    progress = True
                    if isinstance(item, str):
                        open_channels.remove(channel)
                        finished.append(channel)
                        continue
                    received += await _load(item, check, loader)
                    del item  # after the acknowledgement this bucket's memory counts as free
                    channel.acknowledge(self._endpoint)
                if not progress:
                    await self._wait(news, open_channels, plan, where)
            check.complete()
            for channel in finished:
                channel.poll(self._endpoint)  # raises if its sender failed while another rank's stream was read
                channel.acknowledge(self._endpoint)
                channel.detach(self._endpoint)
        except BaseException as error:
            for channel in open_channels + finished:
                channel.leave(self._endpoint, error)
            raise
        return received

    def close(self) -> None:
        """Do nothing: a receiver holds nothing between syncs."""

    def _channel(self, plan: SyncRequest, offer: SyncOffer) -> Channel:
        content = offer.content
        if not isinstance(content, DirectOffer):
            raise WeightSyncError(
                f"{describe(plan, 'direct')}: sender rank {offer.sender_rank} offered a {type(content).__name__}, "
                f"which is not an offer of 'direct'; both ends must use the same transport"
            )
        if content.channel is None:
            raise WeightSyncError(
                f"{describe(plan, 'direct')}: sender {describe_endpoint(content.sender)} and receiver "
                f"{describe_endpoint(self._endpoint)} do not share a process; {REMEDY}"
            )
        if content.channel.sync_id != plan.sync_id:
            raise WeightSyncError(
                f"{describe(plan, 'direct')}: sender rank {offer.sender_rank} offered sync {content.channel.sync_id!r}"
            )
        return content.channel

    async def _wait(self, news: asyncio.Event, channels: list[Channel], plan: SyncRequest, where: str) -> None:
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the result.
            async with asyncio.timeout(plan.timeout_s):
                await news.wait()
        except TimeoutError as error:
            ranks = sorted(channel.sender.rank for channel in channels)
            raise BackendTimeoutError(
                f"{where}: waited {plan.timeout_s:g} s (weight_sync.timeout_s) for sender ranks {ranks} of role "
                f"{channels[0].sender.role!r}, which sent nothing"
            ) from error


async def _load(bucket: Bucket, check: StreamCheck, loader: WeightLoader) -> int:
    """Load one bucket. As a separate function, it leaves no local reference to a tensor after the acknowledgement."""
    for shard in bucket:
        check.admit(shard)
    await loader.load_tensors((shard.name, shard.tensor) for shard in bucket)
    return num_bytes(bucket)
