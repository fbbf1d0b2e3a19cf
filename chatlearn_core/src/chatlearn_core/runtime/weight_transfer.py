"""One weight sync of the local runtime: check first, then send and receive at the same time, then confirm."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from chatlearn_core.exceptions import BackendTimeoutError, PluginError, WeightSyncError, WorkerPlace
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Generator, Trainer, WeightReceiver, WeightSender
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.runtime.plan import WeightSyncPlan
from chatlearn_core.runtime.sync_answers import checked_num_bytes, checked_offer
from chatlearn_core.runtime.sync_planner import SyncPlanner
from chatlearn_core.types import Endpoint, SyncOffer, SyncPlan, SyncReceipt, WeightManifest

_GRACE_S = 5.0
"""The transport's own timeout speaks first: it knows whom it waits for."""
_NOTICE_S = 2.0
"""How long a sender may take to notice that every receiver has failed."""

Replicas = Sequence[tuple[int, Generator]]
Loading = Callable[[Sequence[int]], AbstractContextManager[None]]


class WeightTransfer:
    """The transport between one trainer and one generator role: its sender, and a receiver for each replica.

    Args:
        loading: entered around every turn, with the replicas that serve nothing in it.
    """

    def __init__(
        self,
        plan: WeightSyncPlan,
        registry: PluginRegistry,
        workspace: Path,
        num_replicas: int,
        loading: Loading = lambda indices: nullcontext(),
    ) -> None:
        self.plan = plan
        self._transport = f"weight sync {plan.record.name!r} ({registry.origin(plan.record)})"
        self._loading = loading
        self.planner = SyncPlanner(plan, workspace)
        self._sender_endpoint = _endpoint(plan.trainer, 0)
        self._receiver_endpoints = [_endpoint(plan.generator, i) for i in range(num_replicas)]
        make_sender = registry.load_factory(plan.record, "sender")
        self._make_receiver = registry.load_factory(plan.record, "receiver")
        self.sender: WeightSender = make_sender(plan.options, self._sender_endpoint)
        self.receivers: list[WeightReceiver] = [
            self._make_receiver(plan.options, endpoint) for endpoint in self._receiver_endpoints
        ]

    async def sync(self, trainer: Trainer, lane: Lane, replicas: Replicas, policy_version: int) -> list[SyncReceipt]:
        """Bring the trainer's weights to these replicas, all together or in turns as the fleet rule says.

        The manifest is checked against every replica of a turn before the first byte moves. A replica that fails is
        dead; the others serve the new version.

        Raises:
            WeightSyncError: the manifest does not match a replica's model; nothing was moved to its turn.
        """
        replica_of = dict(replicas)
        turns = self.planner.turns(list(replica_of))
        if self.planner.sends_ahead:
            return await self._send_ahead(trainer, lane, replica_of, turns, policy_version)
        receipts: list[SyncReceipt] = []
        for turn in turns:
            plan = self._make_plan(trainer, turn, policy_version)
            with self._loading(turn):
                dead = await self._begin(plan, [(index, replica_of[index]) for index in turn])
                receipts += dead
                gone = {receipt.replica for receipt in dead}
                together = [(index, replica_of[index]) for index in turn if index not in gone]
                if gone and together:  # nothing waits for them
                    plan = self._plan(plan.manifest, [index for index, _ in together], policy_version)
                if not together:
                    continue
                try:
                    receipts += await self._transfer(plan, trainer, lane, together)
                finally:
                    self.sender.release(plan)
        return receipts

    async def resync(
        self, trainer: Trainer, lane: Lane, index: int, replica: Generator, policy_version: int
    ) -> SyncReceipt:
        """Bring the current version to a replica that was rebuilt, without the trainer where the transport keeps it.

        Raises: as ``sync``.
        """
        self.receivers[index].close()
        endpoint = self._receiver_endpoints[index]
        endpoint = self._receiver_endpoints[index] = replace(endpoint, incarnation=endpoint.incarnation + 1)
        self.receivers[index] = self._make_receiver(self.plan.options, endpoint)
        plan = self.planner.replay(policy_version, endpoint)
        if plan is None:
            [receipt] = await self.sync(trainer, lane, [(index, replica)], policy_version)
            return receipt
        with self._loading([index]):
            for receipt in await self._begin(plan, [(index, replica)]):
                return receipt
            return await self._receive(plan, [], index, replica, time.perf_counter())

    def _make_plan(self, trainer: Trainer, indices: Sequence[int], policy_version: int) -> SyncPlan:
        return self._plan(trainer.manifest(self.plan.payload), indices, policy_version)

    def _plan(self, manifest: WeightManifest, indices: Sequence[int], policy_version: int) -> SyncPlan:
        receivers = [self._receiver_endpoints[index] for index in indices]
        return self.planner.make(policy_version, manifest, [self._sender_endpoint], receivers)

    async def _begin(self, plan: SyncPlan, replicas: Replicas) -> list[SyncReceipt]:
        """Every replica checks the manifest; if one refuses, those that had stopped serving are given up.

        Returns:
            Receipts of those that are dead, or do not come to it: no reason to keep the weights from the others.
        """
        begun: list[Generator] = []
        dead: list[SyncReceipt] = []
        for index, replica in replicas:
            try:
                await self._begin_one(plan, index, replica)
            except BaseException as error:
                if isinstance(error, Exception) and replica.state == "dead":
                    receipt = SyncReceipt(index, plan.policy_version, "dead", error=f"{type(error).__name__}: {error}")
                    dead.append(self._confirmed(plan, receipt))
                    continue
                for other in begun:
                    await other.loader.fail(f"another replica refused the weights: {error}")
                raise
            begun.append(replica)
        return dead

    async def _begin_one(self, plan: SyncPlan, index: int, replica: Generator) -> None:
        try:
            async with asyncio.timeout(plan.timeout_s + _GRACE_S) as limit:
                await replica.loader.begin(plan.policy_version, plan.manifest)
        except TimeoutError as error:
            if not limit.expired():
                raise
            reason = f"it did not stop serving within {plan.timeout_s:g} s (weight_sync.timeout_s)"
            await replica.loader.fail(reason)
            raise BackendTimeoutError(
                f"weight sync of policy version {plan.policy_version}: role {self.plan.generator!r}, replica {index}: "
                f"{reason}"
            ).at(WorkerPlace(self.plan.generator, f"replica {index}", "begin")) from error

    async def _transfer(self, plan: SyncPlan, trainer: Trainer, lane: Lane, replicas: Replicas) -> list[SyncReceipt]:
        """Send and receive at the same time. A sender that fails ends the wait of the receivers."""
        start = time.perf_counter()
        try:
            offer = self._offer(plan)
        except Exception as error:
            return await self._sender_failed(plan, replicas, error)
        sending = asyncio.create_task(self._send(plan, trainer, lane))
        receiving = [asyncio.create_task(self._receive(plan, [offer], i, r, start)) for i, r in replicas]
        try:
            await self._all_over(plan, sending, receiving)
        except asyncio.CancelledError:
            sending.cancel()  # its thread ends when the sender is released
            raise
        finally:
            for task in receiving:
                task.cancel()  # does nothing to those that are done
            outcomes = await asyncio.gather(*receiving, return_exceptions=True)
        [failure] = await asyncio.gather(sending, return_exceptions=True)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, SyncReceipt)]
        if isinstance(failure, BaseException):
            failed_before = {receipt.replica: receipt for receipt in receipts if receipt.state == "dead"}
            lost = await self._sender_failed(plan, replicas, failure)
            return [failed_before.get(receipt.replica, receipt) for receipt in lost]
        return receipts

    def _offer(self, plan: SyncPlan) -> SyncOffer:
        try:
            offer = self.sender.offer(plan)
        except SystemExit as error:
            raise PluginError(
                f"{self._transport}: offer() of its sender tried to end the process: {error!r}"
            ) from error
        return checked_offer(offer, self._transport, self._sender_endpoint.rank)

    async def _all_over(
        self, plan: SyncPlan, sending: asyncio.Task[None], receiving: Sequence[asyncio.Task[SyncReceipt]]
    ) -> None:
        """Wait for the sender and the receivers, until one raises. A sender without a receiver is ended."""
        tasks = {sending, *receiving}
        while waiting := [task for task in tasks if not task.done()]:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() or task.exception() is not None for task in done):
                return
            if not sending.done() and all(task.done() and task.result().state == "dead" for task in receiving):
                await asyncio.wait([sending], timeout=_NOTICE_S)  # most notice it themselves, and say more
                if not sending.done():
                    self.sender.release(plan)
                    await asyncio.wait([sending], timeout=_NOTICE_S)
                return

    async def _send_ahead(
        self, trainer: Trainer, lane: Lane, replicas: dict[int, Generator], turns: list[list[int]], policy_version: int
    ) -> list[SyncReceipt]:
        """Send once while every replica serves on; then they take the version in turns.

        Raises:
            WeightSyncError: the sender failed; every replica serves what it served before.
        """
        plan = self._make_plan(trainer, list(replicas), policy_version)
        receipts: list[SyncReceipt] = []
        try:
            try:
                offer = self._offer(plan)
                await self._send(plan, trainer, lane)
            except Exception as error:
                raise WeightSyncError(
                    f"weight sync of policy version {policy_version}: the sender failed before a replica began: {error}"
                ) from error
            for turn in turns:
                with self._loading(turn):
                    dead = await self._begin(plan, [(index, replicas[index]) for index in turn])
                    receipts += dead
                    gone = {receipt.replica for receipt in dead}
                    start = time.perf_counter()
                    receiving = [
                        self._receive(plan, [offer], index, replicas[index], start)
                        for index in turn
                        if index not in gone
                    ]
                    receipts += await asyncio.gather(*receiving)
        finally:
            self.sender.release(plan)
        return receipts

    async def _send(self, plan: SyncPlan, trainer: Trainer, lane: Lane) -> None:
        limit = plan.timeout_s + _GRACE_S
        await lane.run(
            "send weights", self.sender.send, plan, trainer, timeout_s=limit, setting="weight_sync.timeout_s"
        )
        self.planner.sent(plan)

    async def _sender_failed(self, plan: SyncPlan, replicas: Replicas, failure: BaseException) -> list[SyncReceipt]:
        reason = f"the sender failed: {failure}"
        for _, replica in replicas:
            await replica.loader.fail(reason)
        return [self._confirmed(plan, SyncReceipt(i, plan.policy_version, "dead", error=reason)) for i, _ in replicas]

    async def _receive(
        self, plan: SyncPlan, offers: Sequence[SyncOffer], index: int, replica: Generator, start: float
    ) -> SyncReceipt:
        try:
            async with asyncio.timeout(plan.timeout_s + _GRACE_S):
                received = await self.receivers[index].receive(plan, offers, replica.loader)
                num_bytes = checked_num_bytes(received, self._transport)
                version = await replica.loader.finish()
        except (Exception, SystemExit) as error:  # which would end the event loop
            reason = str(error) or f"no answer within {plan.timeout_s:g} s (weight_sync.timeout_s)"
            await replica.loader.fail(reason)
            text = f"{type(error).__name__}: {reason}"
            return self._confirmed(plan, SyncReceipt(index, plan.policy_version, "dead", error=text))
        if version != plan.policy_version:
            reason = f"it confirmed version {version} where {plan.policy_version} was sent"
            await replica.loader.fail(reason)
            return self._confirmed(plan, SyncReceipt(index, version, "dead", error=reason))
        seconds = time.perf_counter() - start
        receipt = SyncReceipt(index, version, "serving", num_bytes, seconds, weight_bytes=plan.manifest.num_bytes)
        return self._confirmed(plan, receipt)

    def _confirmed(self, plan: SyncPlan, receipt: SyncReceipt) -> SyncReceipt:
        self.planner.confirm(plan, self._receiver_endpoints[receipt.replica], receipt)
        return receipt

    def close(self) -> None:
        """Close both ends."""
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


def _endpoint(role: str, replica: int) -> Endpoint:
    return Endpoint(role, replica, 0, socket.gethostname(), "local", os.getpid())
