"""One weight sync over processes: check first, then send and receive at the same time, then confirm."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.exceptions import BackendTimeoutError, ChatLearnError, WeightSyncError
from chatlearn_core.runtime.plan import WeightSyncPlan
from chatlearn_core.runtime.sync_planner import SyncPlanner
from chatlearn_core.types import Endpoint, SyncOffer, SyncPlan, SyncReceipt, WeightManifest
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.generator_fleet import RayGeneratorFleet, Replica
from chatlearn_ray.trainer_group import RayTrainerGroup
from chatlearn_ray.worker import GRACE_S
from chatlearn_ray.worker_spec import PluginChoice

NOTICE_S = 2.0
"""How long senders may take to notice that every receiver has failed; then they are stopped."""
_FAIL_S = 30.0
"""How long a replica may take to give up what it began."""


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
        self._planner = SyncPlanner(plan, workspace)
        self._plugin = plugin
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
        """Bring the trainer's weights to these replicas, all together or in turns as the fleet rule says.

        The manifest is checked against every replica of a turn before the first byte moves. A replica that fails is
        dead; the others serve the new version.

        Raises:
            WeightSyncError: the manifest does not match a replica's model; nothing was moved to its turn.
        """
        receipts = await self._gone(indices, policy_version)
        gone = {receipt.replica for receipt in receipts}
        turns = self._planner.turns([index for index in indices if index not in gone])
        if self._planner.sends_ahead:
            return receipts + await self._send_ahead(turns, policy_version)
        for turn in turns:
            replicas = {index: self._fleet.replicas[index] for index in turn}
            plan = await self._make_plan(replicas.values(), policy_version)
            with self._fleet.loading(turn):
                dead = await self._begin(plan, replicas)
                receipts += dead
                gone = {receipt.replica for receipt in dead}
                replicas = {index: replica for index, replica in replicas.items() if index not in gone}
                if not replicas:
                    continue
                if gone:  # nothing waits for them
                    plan = await self._plan(plan.manifest, replicas.values(), policy_version)
                shared = ray.put(plan)
                try:
                    receipts += self._note(plan, replicas, await self._transfer(shared, plan, replicas))
                finally:
                    await self._release(shared)
        return receipts

    async def _gone(self, indices: Sequence[int], policy_version: int) -> list[SyncReceipt]:
        """Open the receivers of replicas that have none yet; receipts of those whose process is gone."""
        receipts: list[SyncReceipt] = []
        for index in indices:
            replica = self._fleet.replicas[index]
            try:
                await self._endpoint(replica)
            except (WorkerDiedError, BackendTimeoutError) as error:
                receipts.append(_dead(index, replica, policy_version, error))
        return receipts

    async def resync(self, index: int, policy_version: int) -> SyncReceipt:
        """Bring the current version to a replica that was rebuilt, without the trainer where the transport keeps it.

        Raises: as ``sync``.
        """
        replica = self._fleet.replicas[index]
        plan = self._planner.replay(policy_version, await self._endpoint(replica))
        if plan is None:
            [receipt] = await self.sync([index], policy_version)
            return receipt
        shared, replicas = ray.put(plan), {index: replica}
        with self._fleet.loading([index]):
            for receipt in await self._begin(plan, replicas):
                return receipt
            receipt = await self._receive(shared, plan, [], index, replica)
            self._note(plan, replicas, [receipt])
        return receipt

    async def _make_plan(self, replicas: Iterable[Replica], policy_version: int) -> SyncPlan:
        manifests = await self._trainer.every_rank("manifest", self.plan.payload)
        return await self._plan(manifests[0], replicas, policy_version)

    async def _plan(self, manifest: WeightManifest, replicas: Iterable[Replica], policy_version: int) -> SyncPlan:
        receivers = [await self._endpoint(replica) for replica in replicas]
        return self._planner.make(policy_version, manifest, self._senders, receivers)

    async def _send_ahead(self, turns: list[list[int]], policy_version: int) -> list[SyncReceipt]:
        """Send once while every replica serves on; then they take the version in turns.

        Raises:
            WeightSyncError: the senders failed; every replica serves what it served before.
        """
        everyone = [self._fleet.replicas[index] for turn in turns for index in turn]
        plan = await self._make_plan(everyone, policy_version)
        shared = ray.put(plan)
        receipts: list[SyncReceipt] = []
        try:
            try:
                offers: list[SyncOffer] = await self._trainer.every_rank("offer", self.key, shared)
                await self._send(shared, plan)
            except ChatLearnError as error:
                if self._trainer.is_broken:
                    raise
                raise WeightSyncError(
                    f"weight sync of policy version {policy_version}: the senders failed before a replica began: "
                    f"{error}"
                ) from error
            for turn in turns:
                replicas = {index: self._fleet.replicas[index] for index in turn}
                with self._fleet.loading(turn):
                    dead = await self._begin(plan, replicas)
                    receipts += dead
                    gone = {receipt.replica for receipt in dead}
                    answers = await asyncio.gather(
                        *(
                            self._receive(shared, plan, offers, index, replica)
                            for index, replica in replicas.items()
                            if index not in gone
                        )
                    )
                    receipts += self._note(plan, replicas, answers)
        finally:
            await self._release(shared)
        return receipts

    async def _release(self, shared: Any) -> None:
        if not self._trainer.is_broken:  # the processes of a broken one are killed, and hold nothing then
            await self._trainer.every_rank("release", self.key, shared)

    def _note(
        self, plan: SyncPlan, replicas: Mapping[int, Replica], receipts: Sequence[SyncReceipt]
    ) -> Sequence[SyncReceipt]:
        for receipt in receipts:
            replica = replicas[receipt.replica]
            replica.state, replica.policy_version = receipt.state, receipt.policy_version
            self._planner.confirm(plan, self._receivers[replica], receipt)
        return receipts

    async def _begin(self, plan: SyncPlan, replicas: dict[int, Replica]) -> list[SyncReceipt]:
        """Every replica checks the manifest; if one refuses, those that stopped serving are given up.

        Returns:
            Receipts of those that are dead, or do not come to it: no reason to keep the weights from the others.
        """
        shared = ray.put(plan)
        outcomes = await asyncio.gather(
            *(replica.worker.call("begin", shared, timeout_s=plan.timeout_s) for replica in replicas.values()),
            return_exceptions=True,
        )
        dead: list[SyncReceipt] = []
        refusals: list[BaseException] = []
        begun: list[Replica] = []
        for (index, replica), outcome in zip(replicas.items(), outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                begun.append(replica)
            elif isinstance(outcome, WorkerDiedError | BackendTimeoutError) or not await self._fleet.lives(replica):
                dead.append(_dead(index, replica, plan.policy_version, outcome))
            else:
                refusals.append(outcome)
        if refusals:
            await self._fail(begun, f"another replica refused the weights: {refusals[0]}")
            raise refusals[0]
        return dead

    async def _transfer(self, shared: Any, plan: SyncPlan, replicas: dict[int, Replica]) -> list[SyncReceipt]:
        """Send and receive at the same time. A sender that fails ends the wait of the receivers."""
        try:
            offers: list[SyncOffer] = await self._trainer.every_rank("offer", self.key, shared)
        except ChatLearnError as error:
            receipts = await self._give_up(plan, replicas, f"the sender failed: {error}")
            if self._trainer.is_broken:
                raise
            return receipts
        sending = asyncio.create_task(self._send(shared, plan))
        receiving = {
            index: asyncio.create_task(self._receive(shared, plan, offers, index, replica))
            for index, replica in replicas.items()
        }
        try:
            await asyncio.wait([sending, *receiving.values()], return_when=asyncio.FIRST_EXCEPTION)
            if not (sending.done() and sending.exception() is not None):
                await asyncio.wait(receiving.values())
                if all(task.result().state == "dead" for task in receiving.values()):
                    await asyncio.wait([sending], timeout=NOTICE_S)  # most notice it themselves, and say more
                    if not sending.done():
                        await self._release(shared)
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

    async def _send(self, shared: Any, plan: SyncPlan) -> None:
        await self._trainer.every_rank("send", self.key, shared, timeout_s=plan.timeout_s + GRACE_S)
        self._planner.sent(plan)

    async def _receive(
        self, shared: Any, plan: SyncPlan, offers: Sequence[SyncOffer], index: int, replica: Replica
    ) -> SyncReceipt:
        limit = plan.timeout_s + GRACE_S
        try:
            receipt: SyncReceipt = await replica.worker.call("receive", self.key, shared, offers, timeout_s=limit)
        except ChatLearnError as error:
            return SyncReceipt(index, plan.policy_version, "dead", error=str(error))
        return receipt

    async def _give_up(self, plan: SyncPlan, replicas: dict[int, Replica], reason: str) -> list[SyncReceipt]:
        await self._fail(replicas.values(), reason)
        return [SyncReceipt(index, plan.policy_version, "dead", error=reason) for index in replicas]

    async def _fail(self, replicas: Collection[Replica], reason: str) -> None:
        """Give replicas up; one that does not even hear of it is killed when it is replaced."""
        calls = (replica.worker.call("fail", reason, timeout_s=_FAIL_S) for replica in replicas)
        await asyncio.gather(*calls, return_exceptions=True)
        for replica in replicas:
            replica.state = "dead"


def _dead(index: int, replica: Replica, policy_version: int, error: BaseException) -> SyncReceipt:
    replica.state = "dead"
    return SyncReceipt(index, policy_version, "dead", error=f"{type(error).__name__}: {error}")
