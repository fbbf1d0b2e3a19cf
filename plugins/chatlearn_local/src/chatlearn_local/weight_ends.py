"""Senders and receivers of the local runtime: both in this process."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from chatlearn_core.exceptions import BackendTimeoutError, PluginError, WorkerPlace
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import WeightLoader, WeightReceiver, WeightSender
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Endpoint, Payload, SyncOffer, SyncReceipt, SyncRequest, WeightManifest
from chatlearn_local.trainer import LocalTrainer
from chatlearn_runtime_kit.sync_answers import SEND, checked_num_bytes, checked_offer
from chatlearn_runtime_kit.weight_ends import GRACE_S, take_weights, unfit_tensors


class LocalSenders:
    """Implements ``SenderGroup`` for a trainer of one rank, which streams its weights in its own executor."""

    is_lost = False

    def __init__(self, route: WeightRoute, registry: PluginRegistry, trainer: LocalTrainer) -> None:
        self._trainer = trainer
        self._transport = f"weight sync {route.record.name!r} ({registry.origin(route.record)})"
        self._endpoint = _endpoint(route.trainer, 0)
        self.sender: WeightSender = registry.load_factory(route.record, "sender")(route.options, self._endpoint)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return (self._endpoint,)

    async def manifest(self, payload: Payload) -> WeightManifest:
        return await self._trainer.manifest(payload)

    async def offer(self, request: SyncRequest) -> list[SyncOffer]:
        try:
            offer = self.sender.offer(request)
        except SystemExit as error:
            raise PluginError(
                f"{self._transport}: offer() of its sender tried to end the process: {error!r}"
            ) from error
        return [checked_offer(offer, self._transport, self._endpoint.rank)]

    async def send(self, request: SyncRequest) -> None:
        limit = request.timeout_s + GRACE_S
        send, trainer = self.sender.send, self._trainer.trainer
        sent = await self._trainer.executor.run(
            "send weights", send, request, trainer, timeout_s=limit, setting="weight_sync.timeout_s"
        )
        checked_num_bytes(sent, self._transport, SEND)

    async def release(self, request: SyncRequest) -> None:
        self.sender.release(request)

    def close(self) -> None:
        """Close the sender. Safe to call twice."""
        self.sender.close()


class Receiving(Protocol):
    """A generator replica, or a trainer that follows another: what has a loader."""

    @property
    def loader(self) -> WeightLoader: ...

    @property
    def state(self) -> str: ...


class ReceivingFleet(Protocol):
    """Those that take weights, as ``LocalFleet`` and ``Follower`` have them."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def replicas(self) -> Sequence[Receiving]: ...

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        """In the block requests go past these replicas."""

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        """See ``ReceiverGroup``."""


@dataclass(slots=True, frozen=True, eq=False)
class Follower:
    """A trainer of one rank that takes another's weights: a fleet of one that gets no requests."""

    loader: WeightLoader
    state: str = "serving"
    """It never dies alone: what fails is raised to the run."""
    num_replicas: int = 1

    @property
    def replicas(self) -> Sequence[Receiving]:
        """Itself."""
        return (self,)

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        """See ``ReceivingFleet``: it has no requests."""
        return nullcontext()

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        """See ``ReceivingFleet``: it has no requests."""
        return nullcontext()


class LocalReceivers:
    """Implements ``ReceiverGroup`` for replicas that are objects of this process."""

    def __init__(self, route: WeightRoute, registry: PluginRegistry, fleet: ReceivingFleet) -> None:
        self._route = route
        self._fleet = fleet
        self._transport = f"weight sync {route.record.name!r} ({registry.origin(route.record)})"
        self._make_receiver = registry.load_factory(route.record, "receiver")
        self._endpoints = [_endpoint(route.target, replica) for replica in range(fleet.num_replicas)]
        self._generators = list(fleet.replicas)
        """The generators that the receivers belong to."""
        self.receivers: list[WeightReceiver] = [
            self._make_receiver(route.options, endpoint) for endpoint in self._endpoints
        ]

    async def endpoint(self, replica: int) -> Endpoint:
        if self._generators[replica] is not self._fleet.replicas[replica]:
            self.receivers[replica].close()
            former = self._endpoints[replica]
            endpoint = self._endpoints[replica] = replace(former, incarnation=former.incarnation + 1)
            self.receivers[replica] = self._make_receiver(self._route.options, endpoint)
            self._generators[replica] = self._fleet.replicas[replica]
        return self._endpoints[replica]

    async def unfit(self, replica: int, request: SyncRequest) -> list[str]:
        return unfit_tensors(self._fleet.replicas[replica].loader, request)

    async def begin(self, replica: int, request: SyncRequest) -> None:
        loader = self._fleet.replicas[replica].loader
        try:
            async with asyncio.timeout(request.timeout_s + GRACE_S) as limit:
                await loader.begin(request.policy_version, request.manifest)
        except SystemExit as error:  # it would end the event loop
            raise PluginError(
                f"role {self._route.target!r}, replica {replica}: begin() tried to end the process: {error!r}"
            ) from error
        except TimeoutError as error:
            if not limit.expired():
                raise
            reason = f"it did not stop serving within {request.timeout_s:g} s (weight_sync.timeout_s)"
            await loader.fail(reason)
            raise BackendTimeoutError(
                f"weight sync of policy version {request.policy_version}: role {self._route.target!r}, replica "
                f"{replica}: {reason}"
            ).at(WorkerPlace(self._route.target, f"replica {replica}", "begin")) from error

    async def receive(self, replica: int, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        loader = self._fleet.replicas[replica].loader
        return await take_weights(self.receivers[replica], loader, request, offers, replica, self._transport)

    async def fail(self, replicas: Collection[int], reason: str) -> None:
        for replica in replicas:
            await self._fleet.replicas[replica].loader.fail(reason)

    async def lives(self, replica: int) -> bool:
        return self._fleet.replicas[replica].state != "dead"

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        return self._fleet.loading(replicas)

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        return self._fleet.interrupted(replicas)

    def close(self) -> None:
        """Close every receiver. Safe to call twice."""
        for receiver in self.receivers:
            receiver.close()


def _endpoint(role: str, replica: int) -> Endpoint:
    return Endpoint(role, replica, 0, socket.gethostname(), "local", os.getpid())
