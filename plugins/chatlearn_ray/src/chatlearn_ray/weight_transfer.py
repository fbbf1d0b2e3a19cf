"""One weight sync over processes: check first, then send and receive at the same time, then confirm."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.runtime.plan import WeightSyncPlan
from chatlearn_core.types import Endpoint, SyncOffer, SyncPlan, SyncReceipt
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.generator_fleet import RayGeneratorFleet, Replica
from chatlearn_ray.trainer_group import RayTrainerGroup
from chatlearn_ray.worker import GRACE_S
from chatlearn_ray.worker_spec import PluginChoice


class RayWeightTransfer:
    """The transport between one trainer and one generator role: a sender in every rank, a receiver in every replica.

    The driver carries the plan, the offers and the receipts; the bytes go the transport's own way.
    """

    def __init__(
        self,
        plan: WeightSyncPlan,
        plugin: PluginChoice,
        workspace: Path,
        trainer: RayTrainerGroup,
        fleet: RayGeneratorFleet,
    ) -> None:
        self.plan = plan
        self.key = f"{plan.trainer}->{plan.generator}"
        self._plugin = plugin
        self._workspace = workspace
        self._trainer = trainer
        self._fleet = fleet
        self._senders: tuple[Endpoint, ...] = ()
        self._receivers: dict[Replica, Endpoint] = {}

    async def open_senders(self) -> None:
        """Build the sender of every rank; again after the trainer was rebuilt."""
        self._senders = tuple(await self._trainer.every_rank("open_transport", self.key, self._plugin))

    async def _endpoint(self, replica: Replica) -> Endpoint:
        if replica not in self._receivers:
            self._receivers[replica] = await replica.worker.call("open_transport", self.key, self._plugin)
        return self._receivers[replica]

    async def sync(self, indices: Sequence[int], policy_version: int) -> list[SyncReceipt]:
        """Bring the trainer's weights to these replicas, under a new version.

        The manifest is checked against every replica before the first byte moves. A replica that fails is dead; the
        others serve the new version.

        Raises:
            WeightSyncError: the manifest does not match a replica's model; nothing was moved.
        """
        replicas = {index: self._fleet.replicas[index] for index in indices}
        manifests = await self._trainer.every_rank("manifest")
        plan = SyncPlan(
            sync_id=f"v{policy_version}-{uuid.uuid4().hex[:8]}",
            policy_version=policy_version,
            base_version=None,
            payload="full",
            manifest=manifests[0],
            senders=self._senders,
            receivers=tuple([await self._endpoint(replica) for replica in replicas.values()]),
            fleet_rule=self.plan.fleet_rule,
            bucket_bytes=self.plan.bucket_bytes,
            timeout_s=self.plan.timeout_s,
            workspace=str(self._workspace.absolute()),
        )
        shared = ray.put(plan)
        await self._begin(shared, replicas)
        try:
            receipts = await self._transfer(shared, plan, replicas)
        finally:
            if not self._trainer.is_broken:  # the processes of a broken one are killed, and hold nothing then
                await self._trainer.every_rank("release", self.key, shared)
        for receipt in receipts:
            replica = replicas[receipt.replica]
            replica.state, replica.policy_version = receipt.state, receipt.policy_version
        return receipts

    async def _begin(self, shared: Any, replicas: dict[int, Replica]) -> None:
        """Every replica checks the manifest; if one refuses, those that stopped serving are given up.

        A replica whose process is gone is dead, which is no reason to keep the new weights from the others.
        """
        outcomes = await asyncio.gather(
            *(replica.worker.call("begin", shared) for replica in replicas.values()), return_exceptions=True
        )
        refusals = [o for o in outcomes if isinstance(o, BaseException) and not _is_gone(o)]
        for replica, outcome in zip(replicas.values(), outcomes, strict=True):
            if isinstance(outcome, BaseException) and _is_gone(outcome):
                replica.state = "dead"
            elif refusals and outcome is None:
                await replica.worker.call("fail", f"another replica refused the weights: {refusals[0]}")
                replica.state = "dead"
        if refusals:
            raise refusals[0]

    async def _transfer(self, shared: Any, plan: SyncPlan, replicas: dict[int, Replica]) -> list[SyncReceipt]:
        """Send and receive at the same time. A sender that fails ends the wait of the receivers."""
        limit = plan.timeout_s + GRACE_S
        try:
            offers: list[SyncOffer] = await self._trainer.every_rank("offer", self.key, shared)
        except ChatLearnError as error:
            return await self._give_up(plan, replicas, f"the sender failed: {error}")
        sending = asyncio.create_task(self._trainer.every_rank("send", self.key, shared, timeout_s=limit))
        receiving = {
            index: asyncio.create_task(self._receive(plan, shared, offers, index, replica, limit))
            for index, replica in replicas.items()
        }
        try:
            await asyncio.wait([sending, *receiving.values()], return_when=asyncio.FIRST_EXCEPTION)
            if not (sending.done() and sending.exception() is not None):
                await asyncio.wait(receiving.values())
                await asyncio.wait([sending])
        finally:
            for task in (sending, *receiving.values()):
                task.cancel()
        failure = sending.exception()
        if failure is not None:
            receipts = await self._give_up(plan, replicas, f"the sender failed: {failure}")
            if self._trainer.is_broken:
                raise failure
            return receipts
        return [receiving[index].result() for index in replicas]

    async def _receive(
        self, plan: SyncPlan, shared: Any, offers: list[SyncOffer], index: int, replica: Replica, limit: float
    ) -> SyncReceipt:
        if replica.state == "dead":
            return SyncReceipt(index, plan.policy_version, "dead", error="its process is gone")
        try:
            receipt: SyncReceipt = await replica.worker.call("receive", self.key, shared, offers, timeout_s=limit)
        except ChatLearnError as error:
            return SyncReceipt(index, plan.policy_version, "dead", error=str(error))
        return receipt

    async def _give_up(self, plan: SyncPlan, replicas: dict[int, Replica], reason: str) -> list[SyncReceipt]:
        await asyncio.gather(
            *(replica.worker.call("fail", reason) for replica in replicas.values()), return_exceptions=True
        )
        return [SyncReceipt(index, plan.policy_version, "dead", error=reason) for index in replicas]


def _is_gone(error: BaseException) -> bool:
    return isinstance(error, WorkerDiedError)
