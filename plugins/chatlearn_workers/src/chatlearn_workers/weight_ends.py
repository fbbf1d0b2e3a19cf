"""Senders and receivers in worker processes, called by ``WeightTransfer``."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any

from chatlearn_core.exceptions import BackendTimeoutError, ChatLearnError
from chatlearn_core.types import Endpoint, Payload, SyncOffer, SyncReceipt, SyncRequest, WeightManifest
from chatlearn_runtime_kit.weight_ends import GRACE_S
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.generator_fleet import RemoteGeneratorFleet, Replica
from chatlearn_workers.remote import RemoteWorker
from chatlearn_workers.rpc import ObjectStore
from chatlearn_workers.trainer_group import RemoteTrainerGroup
from chatlearn_workers.worker_spec import PluginChoice

_FAIL_S = 30.0
"""Time for a replica to give up a sync it began, seconds."""


class SharedRequest:
    """Stores a request once for all workers that read it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._last: tuple[SyncRequest, Any] | None = None

    def reference(self, request: SyncRequest) -> Any:
        """The stored request's reference."""
        if self._last is None or self._last[0] is not request:
            self._last = request, self._store.put(request)
        return self._last[1]


class RemoteSenders:
    """Implements ``SenderGroup``: a sender in every rank of a trainer.

    Args:
        key: identifies the route in the workers.
        plugin: the transport.
    """

    def __init__(self, key: str, plugin: PluginChoice, shared: SharedRequest, trainer: RemoteTrainerGroup) -> None:
        self._key = key
        self._plugin = plugin
        self._shared = shared
        self._trainer = trainer
        self._endpoints: tuple[Endpoint, ...] = ()

    async def open(self) -> None:
        """Build the sender of every rank; called again after the trainer was rebuilt."""
        self._endpoints = tuple(await self._trainer.every_rank("open_transport", self._key, self._plugin))

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._endpoints

    @property
    def is_lost(self) -> bool:
        return self._trainer.is_broken

    async def manifest(self, payload: Payload) -> WeightManifest:
        return await self._trainer.manifest(payload)

    async def offer(self, request: SyncRequest) -> list[SyncOffer]:
        return await self._trainer.every_rank("offer", self._key, self._shared.reference(request))

    async def send(self, request: SyncRequest) -> None:
        limit = request.timeout_s + GRACE_S
        await self._trainer.every_rank("send", self._key, self._shared.reference(request), timeout_s=limit)

    async def release(self, request: SyncRequest) -> None:
        if not self._trainer.is_broken:  # a broken trainer's processes are killed, which releases everything
            await self._trainer.every_rank("release", self._key, self._shared.reference(request))

    def close(self) -> None:
        """See ``SenderGroup``: the workers close their senders."""


class RemoteReceivers:
    """Implements ``ReceiverGroup``: a receiver in the worker of every replica of a generator.

    Args:
        key: identifies the route in the workers.
        plugin: the transport.
    """

    def __init__(self, key: str, plugin: PluginChoice, shared: SharedRequest, fleet: RemoteGeneratorFleet) -> None:
        self._key = key
        self._plugin = plugin
        self._shared = shared
        self._fleet = fleet
        self._opened: dict[int, tuple[Replica, Endpoint]] = {}

    async def endpoint(self, replica: int) -> Endpoint:
        served = self._fleet.replicas[replica]
        opened = self._opened.get(replica)
        if opened is None or opened[0] is not served:
            endpoint: Endpoint = await self._call(served, "open_transport", self._key, self._plugin)
            self._opened[replica] = served, endpoint
            return endpoint
        return opened[1]

    async def unfit(self, replica: int, request: SyncRequest) -> list[str]:
        served, shared = self._fleet.replicas[replica], self._shared.reference(request)
        found: list[str] = await self._call(served, "unfit", shared, timeout_s=request.timeout_s)
        return found

    async def begin(self, replica: int, request: SyncRequest) -> None:
        shared = self._shared.reference(request)
        await self._call(self._fleet.replicas[replica], "begin", shared, timeout_s=request.timeout_s)

    async def receive(self, replica: int, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        served, shared = self._fleet.replicas[replica], self._shared.reference(request)
        limit = request.timeout_s + GRACE_S
        try:
            receipt: SyncReceipt = await served.worker.call("receive", self._key, shared, offers, timeout_s=limit)
        except ChatLearnError as error:
            receipt = SyncReceipt(replica, request.policy_version, "dead", error=str(error))
        served.state, served.policy_version = receipt.state, receipt.policy_version
        return receipt

    async def fail(self, replicas: Collection[int], reason: str) -> None:
        """See ``ReceiverGroup``; a worker that does not answer is killed when its replica is replaced."""
        given_up = [self._fleet.replicas[replica] for replica in replicas]
        calls = (replica.worker.call("fail", reason, timeout_s=_FAIL_S) for replica in given_up)
        await asyncio.gather(*calls, return_exceptions=True)
        for replica in given_up:
            replica.state = "dead"

    async def lives(self, replica: int) -> bool:
        served = self._fleet.replicas[replica]
        return served.state != "dead" and await self._fleet.lives(served)

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        return self._fleet.loading(replicas)

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        return self._fleet.interrupted(replicas)

    def close(self) -> None:
        """See ``ReceiverGroup``: the workers close their receivers."""

    async def _call(self, replica: Replica, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a worker; one that is gone or does not answer is marked dead when this raises."""
        try:
            return await replica.worker.call(method, *arguments, timeout_s=timeout_s)
        except (WorkerDiedError, BackendTimeoutError):
            replica.state = "dead"
            raise


class RemoteFollower:
    """Implements ``ReceiverGroup``: a receiver in every rank of a trainer that follows another. Ranks are its replicas.

    A rank that dies or hangs breaks the whole trainer, as in any other call.

    Args:
        key: names the route in the workers.
        plugin: the transport.
        decay: see ``WeightTakingTrainer.weight_loader``.
    """

    def __init__(
        self, key: str, plugin: PluginChoice, shared: SharedRequest, trainer: RemoteTrainerGroup, decay: float
    ) -> None:
        self._key = key
        self._plugin = plugin
        self._shared = shared
        self._trainer = trainer
        self._decay = decay
        self._opened: dict[int, tuple[RemoteWorker, Endpoint]] = {}

    async def open(self) -> bool:
        """Build the receiver of every rank. False where the model cannot take tensors one at a time."""
        endpoints = await self._trainer.every_rank("open_receiver", self._key, self._plugin, self._decay)
        if None in endpoints:
            return False
        self._opened = dict(enumerate(zip(self._trainer.workers, endpoints, strict=True)))
        return True

    async def endpoint(self, replica: int) -> Endpoint:
        worker, opened = self._trainer.workers[replica], self._opened.get(replica)
        if opened is None or opened[0] is not worker:  # it was rebuilt
            endpoint: Endpoint = await self._call(replica, "open_receiver", self._plugin, self._decay)
            self._opened[replica] = worker, endpoint
            return endpoint
        return opened[1]

    async def unfit(self, replica: int, request: SyncRequest) -> list[str]:
        shared = self._shared.reference(request)
        found: list[str] = await self._call(replica, "unfit", shared, timeout_s=request.timeout_s)
        return found

    async def begin(self, replica: int, request: SyncRequest) -> None:
        await self._call(replica, "begin_taking", self._shared.reference(request), timeout_s=request.timeout_s)

    async def receive(self, replica: int, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        limit = request.timeout_s + GRACE_S
        try:
            receipt: SyncReceipt = await self._call(
                replica, "take", self._shared.reference(request), offers, timeout_s=limit
            )
        except ChatLearnError as error:
            return SyncReceipt(replica, request.policy_version, "dead", error=str(error))
        return receipt

    async def fail(self, replicas: Collection[int], reason: str) -> None:
        """See ``ReceiverGroup``; a rank that does not answer breaks the trainer, which the next call says."""
        calls = (self._call(replica, "fail_taking", reason, timeout_s=_FAIL_S) for replica in replicas)
        await asyncio.gather(*calls, return_exceptions=True)

    async def lives(self, replica: int) -> bool:
        return not self._trainer.is_broken

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        """See ``ReceiverGroup``: trainers get no requests meanwhile."""
        return nullcontext()

    def interrupted(self, replicas: Collection[int]) -> AbstractAsyncContextManager[None]:
        """See ``ReceiverGroup``: trainers get no requests."""
        return nullcontext()

    def close(self) -> None:
        """See ``ReceiverGroup``: the workers close their receivers."""

    async def _call(self, replica: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        return await self._trainer.one_rank(replica, method, self._key, *arguments, timeout_s=timeout_s)
