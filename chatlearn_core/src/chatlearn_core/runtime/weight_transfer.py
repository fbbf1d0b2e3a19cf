"""One weight sync of the local runtime: check first, then send and receive at the same time, then confirm."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_core.protocols import Generator, Trainer, WeightReceiver, WeightSender
from chatlearn_core.runtime.lane import Lane
from chatlearn_core.runtime.plan import WeightSyncPlan
from chatlearn_core.types import Endpoint, SyncOffer, SyncPlan, SyncReceipt

_GRACE_S = 5.0
"""The transport's own timeout speaks first: it knows whom it waits for."""


class WeightTransfer:
    """The transport between one trainer and one generator role: its sender, and a receiver for each replica."""

    def __init__(self, plan: WeightSyncPlan, registry: PluginRegistry, workspace: Path, num_replicas: int) -> None:
        self.plan = plan
        self.workspace = workspace
        self._sender_endpoint = _endpoint(plan.trainer, 0)
        self._receiver_endpoints = tuple(_endpoint(plan.generator, i) for i in range(num_replicas))
        make_sender = registry.load_factory(plan.record, "sender")
        make_receiver = registry.load_factory(plan.record, "receiver")
        self.sender: WeightSender = make_sender(plan.options, self._sender_endpoint)
        self.receivers: list[WeightReceiver] = [make_receiver(plan.options, e) for e in self._receiver_endpoints]

    async def sync(
        self, trainer: Trainer, lane: Lane, replicas: Sequence[tuple[int, Generator]], policy_version: int
    ) -> list[SyncReceipt]:
        """Bring the trainer's weights to these replicas.

        The manifest is checked against every replica before the first byte moves. A replica that fails is dead; the
        others serve the new version.

        Raises:
            WeightSyncError: the manifest does not match a replica's model; nothing was moved.
        """
        plan = SyncPlan(
            sync_id=f"v{policy_version}-{uuid.uuid4().hex[:8]}",
            policy_version=policy_version,
            base_version=None,
            payload="full",
            manifest=trainer.manifest(),
            senders=(self._sender_endpoint,),
            receivers=tuple(self._receiver_endpoints[i] for i, _ in replicas),
            fleet_rule=self.plan.fleet_rule,
            bucket_bytes=self.plan.bucket_bytes,
            timeout_s=self.plan.timeout_s,
            workspace=str(self.workspace),
        )
        await self._begin(plan, replicas)
        try:
            return await self._transfer(plan, trainer, lane, replicas)
        finally:
            self.sender.release(plan)

    async def _begin(self, plan: SyncPlan, replicas: Sequence[tuple[int, Generator]]) -> None:
        """Every replica checks the manifest; if one refuses, those that had stopped serving are given up."""
        begun: list[Generator] = []
        for _, replica in replicas:
            try:
                await replica.loader.begin(plan.policy_version, plan.manifest)
            except BaseException as error:
                for other in begun:
                    await other.loader.fail(f"another replica refused the weights: {error}")
                raise
            begun.append(replica)

    async def _transfer(
        self, plan: SyncPlan, trainer: Trainer, lane: Lane, replicas: Sequence[tuple[int, Generator]]
    ) -> list[SyncReceipt]:
        """Send and receive at the same time. A sender that fails ends the wait of the receivers."""
        start = time.perf_counter()
        try:
            offer = self.sender.offer(plan)
        except Exception as error:
            return await self._sender_failed(plan, replicas, error)
        sending = asyncio.create_task(
            lane.run("send weights", self.sender.send, plan, trainer, timeout_s=plan.timeout_s + _GRACE_S)
        )
        receiving = [asyncio.create_task(self._receive(plan, offer, i, r, start)) for i, r in replicas]
        try:
            await asyncio.wait([sending, *receiving], return_when=asyncio.FIRST_EXCEPTION)
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

    async def _sender_failed(
        self, plan: SyncPlan, replicas: Sequence[tuple[int, Generator]], failure: BaseException
    ) -> list[SyncReceipt]:
        reason = f"the sender failed: {failure}"
        for _, replica in replicas:
            await replica.loader.fail(reason)
        return [SyncReceipt(i, plan.policy_version, "dead", error=reason) for i, _ in replicas]

    async def _receive(
        self, plan: SyncPlan, offer: SyncOffer, index: int, replica: Generator, start: float
    ) -> SyncReceipt:
        try:
            async with asyncio.timeout(plan.timeout_s + _GRACE_S):
                num_bytes = await self.receivers[index].receive(plan, [offer], replica.loader)
            version = await replica.loader.finish()
        except Exception as error:
            reason = str(error) or f"no answer within {plan.timeout_s:g} s (weight_sync.timeout_s)"
            await replica.loader.fail(reason)
            return SyncReceipt(index, plan.policy_version, "dead", error=f"{type(error).__name__}: {reason}")
        if version != plan.policy_version:
            reason = f"it confirmed version {version} where {plan.policy_version} was sent"
            await replica.loader.fail(reason)
            return SyncReceipt(index, version, "dead", error=reason)
        return SyncReceipt(index, version, "serving", num_bytes, time.perf_counter() - start)

    def close(self) -> None:
        """Close both ends."""
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


def _endpoint(role: str, replica: int) -> Endpoint:
    return Endpoint(role, replica, 0, socket.gethostname(), "local", os.getpid())
