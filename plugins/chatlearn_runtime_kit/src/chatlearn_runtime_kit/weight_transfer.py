"""One weight sync in any runtime: check first, then send and receive concurrently, then confirm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Endpoint, SyncOffer, SyncReceipt, SyncRequest, WeightManifest
from chatlearn_runtime_kit.sync_planner import SyncPlanner
from chatlearn_runtime_kit.weight_ends import ReceiverGroup, SenderGroup

_MAX_LINES = 10
"""Maximum number of manifest differences in a message."""
_NOTICE_S = 2.0
"""Time for senders to notice that every receiver has failed, seconds; after it they are stopped."""


class WeightTransfer:
    """The weight syncs between one trainer and one generator role.

    Requests, offers and receipts pass through here; the transport moves the bytes.

    Args:
        route: the trainer, the generator and the transport.
        workspace: a directory shared by both ends.
    """

    def __init__(self, route: WeightRoute, workspace: Path, senders: SenderGroup, receivers: ReceiverGroup) -> None:
        self.route = route
        self.planner = SyncPlanner(route, workspace)
        self._senders = senders
        self._receivers = receivers
        self._fits: dict[Endpoint, WeightManifest] = {}
        """Receiver -> the last manifest found to fit its replica."""
        self._sending = asyncio.Lock()
        """Held while the senders send: a replica may be rebuilt while another one loads."""

    async def sync(self, replicas: Sequence[int], policy_version: int) -> list[SyncReceipt]:
        """Transfer the trainer's weights to these replicas, all together or in turns, according to the fleet rule.

        The manifest is checked against every replica of a turn before the first byte moves. A replica that fails is
        dead; the others serve the new version. Replicas whose turn has not come serve, and may die and be rebuilt.

        Raises:
            WeightSyncError: the manifest does not match a replica's model; nothing was moved to its turn.
        """
        if self.planner.sends_ahead:
            return await self._send_ahead(replicas, policy_version)
        receipts: list[SyncReceipt] = []
        for turn in self.planner.turns(replicas):
            with self._receivers.loading(turn):
                async with self._receivers.interrupted(turn), self._sending:
                    receipts += await self._bring(turn, policy_version)
        return receipts

    def keeps(self, policy_version: int) -> bool:
        """Whether the transport keeps this version, so that a replica gets it without the trainer."""
        return self.planner.keeps(policy_version)

    async def resync(self, replica: int, policy_version: int) -> SyncReceipt:
        """Transfer the current version to a rebuilt replica, without the trainer if the transport keeps the version.

        Raises: as ``sync``.
        """
        endpoint = await self._receivers.endpoint(replica)
        async with self._sending:
            request = self.planner.replay(policy_version, endpoint)
            if request is None:
                with self._receivers.loading([replica]):
                    [receipt] = await self._bring([replica], policy_version)
                return receipt
        with self._receivers.loading([replica]):
            for receipt in await self._begin(request, [replica]):
                return receipt
            return await self._receive(replica, request, [])

    async def _bring(self, replicas: Sequence[int], policy_version: int) -> list[SyncReceipt]:
        """Send to these replicas, which load together."""
        reached, receipts = await self._reached(replicas, policy_version)
        if not reached:
            return receipts
        manifest = await self._senders.manifest(self.route.payload)
        request = await self._request(manifest, reached, policy_version)
        return receipts + await self._take_turn(request, reached)

    async def _reached(self, replicas: Sequence[int], policy_version: int) -> tuple[list[int], list[SyncReceipt]]:
        """The replicas that have a receiver, and receipts of those that can no longer open one."""
        reached: list[int] = []
        receipts: list[SyncReceipt] = []
        for replica in replicas:
            try:
                await self._receivers.endpoint(replica)
            except BackendError as error:
                if await self._receivers.lives(replica):
                    raise
                receipts.append(_dead(replica, policy_version, error))
            else:
                reached.append(replica)
        return reached, receipts

    async def _request(self, manifest: WeightManifest, replicas: Sequence[int], policy_version: int) -> SyncRequest:
        receivers = [await self._receivers.endpoint(replica) for replica in replicas]
        return self.planner.make(policy_version, manifest, self._senders.endpoints, receivers)

    async def _take_turn(self, request: SyncRequest, turn: Sequence[int]) -> list[SyncReceipt]:
        dead = await self._begin(request, turn)
        gone = {receipt.replica for receipt in dead}
        begun = [replica for replica in turn if replica not in gone]
        if not begun:
            return dead
        if gone:  # the other replicas do not wait for them
            request = await self._request(request.manifest, begun, request.policy_version)
        try:
            return dead + await self._transfer(request, begun)
        finally:
            await self._senders.release(request)

    async def _begin(self, request: SyncRequest, replicas: Sequence[int]) -> list[SyncReceipt]:
        """Let every replica check the manifest; if one refuses, those that stopped serving are given up. Names and
        shapes are checked earlier, while all replicas serve.

        Returns:
            Receipts of the replicas that died before or meanwhile; the others still get the weights.
        """
        await self._require_fit(request, replicas)
        outcomes = await asyncio.gather(
            *(self._receivers.begin(replica, request) for replica in replicas), return_exceptions=True
        )
        dead: list[SyncReceipt] = []
        refusals: list[BaseException] = []
        begun: list[int] = []
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if outcome is None:
                begun.append(replica)
            elif await self._receivers.lives(replica):
                refusals.append(outcome)
            else:
                dead.append(self._confirmed(request, _dead(replica, request.policy_version, outcome)))
        if refusals:
            await self._receivers.fail(begun, f"another replica refused the weights: {refusals[0]}")
            raise refusals[0]
        return dead

    async def _require_fit(self, request: SyncRequest, replicas: Sequence[int]) -> None:
        """Check the manifest with every replica that has not yet loaded it; a dead one is left to ``begin``.

        Raises:
            WeightSyncError: a replica expects other tensors; all replicas continue to serve their versions.
        """
        ends = {end.replica: end for end in request.receivers}
        asked = [replica for replica in replicas if self._fits.get(ends[replica]) != request.manifest]
        found = await asyncio.gather(*(self._receivers.unfit(r, request) for r in asked), return_exceptions=True)
        for replica, lines in zip(asked, found, strict=True):
            if isinstance(lines, BaseException):
                if await self._receivers.lives(replica):
                    raise lines
                continue
            if lines:
                more = f"\n  and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
                shown = "\n".join(f"  {line}" for line in lines[:_MAX_LINES])
                raise WeightSyncError(
                    f"weight sync of policy version {request.policy_version}: role {self.route.trainer!r} and role "
                    f"{self.route.target!r}, replica {replica}, hold different models: {len(lines)} tensors differ. "
                    f"Nothing was moved. Give both roles models of one architecture and size\n{shown}{more}"
                )
            self._fits[ends[replica]] = request.manifest

    async def _transfer(self, request: SyncRequest, replicas: Sequence[int]) -> list[SyncReceipt]:
        """Send and receive concurrently. If a sender fails, the receivers stop waiting."""
        try:
            offers = await self._senders.offer(request)
        except Exception as error:
            return await self._sender_failed(request, replicas, error)
        sending = asyncio.create_task(self._send(request))
        receiving = [asyncio.create_task(self._receive(replica, request, offers)) for replica in replicas]
        try:
            await self._all_over(request, sending, receiving)
        except asyncio.CancelledError:
            sending.cancel()  # the ranks end when the senders are released
            raise
        finally:
            for task in receiving:
                task.cancel()  # no effect on finished tasks
            outcomes = await asyncio.gather(*receiving, return_exceptions=True)
        [failure] = await asyncio.gather(sending, return_exceptions=True)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, SyncReceipt)]
        if isinstance(failure, BaseException):
            failed_before = {receipt.replica: receipt for receipt in receipts if receipt.state == "dead"}
            lost = await self._sender_failed(request, replicas, failure)
            return [failed_before.get(receipt.replica, receipt) for receipt in lost]
        return receipts

    async def _all_over(
        self, request: SyncRequest, sending: asyncio.Task[None], receiving: Sequence[asyncio.Task[SyncReceipt]]
    ) -> None:
        """Wait for the senders and the receivers, until one raises. Senders without any receiver are stopped."""
        tasks = {sending, *receiving}
        while waiting := [task for task in tasks if not task.done()]:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() or task.exception() is not None for task in done):
                return
            if not sending.done() and all(task.done() and task.result().state == "dead" for task in receiving):
                await asyncio.wait([sending], timeout=_NOTICE_S)  # most notice it themselves, with a better message
                if not sending.done():
                    await self._senders.release(request)
                return

    async def _send_ahead(self, replicas: Sequence[int], policy_version: int) -> list[SyncReceipt]:
        """Send once while every replica serves; afterwards replicas load the version in turns.

        Raises:
            WeightSyncError: the senders failed; every replica continues to serve its version.
        """
        async with self._sending:
            reached, receipts = await self._reached(replicas, policy_version)
            manifest = await self._senders.manifest(self.route.payload)
            request = await self._request(manifest, reached, policy_version)
            try:
                offers = await self._senders.offer(request)
                await self._send(request)
            except BaseException as error:
                await self._senders.release(request)
                if self._senders.is_lost or not isinstance(error, Exception):
                    raise
                raise WeightSyncError(
                    f"weight sync of policy version {policy_version}: the sender failed before a replica began: {error}"
                ) from error
        try:
            for turn in self.planner.turns(reached):
                with self._receivers.loading(turn):
                    async with self._receivers.interrupted(turn):
                        receipts += await self._load_kept(request, turn, offers)
        finally:
            await self._senders.release(request)
        return receipts

    async def _load_kept(
        self, request: SyncRequest, turn: Sequence[int], offers: Sequence[SyncOffer]
    ) -> list[SyncReceipt]:
        """Let replicas load what was sent before. They may have been rebuilt since then."""
        reached, receipts = await self._reached(turn, request.policy_version)
        ends = [await self._receivers.endpoint(replica) for replica in reached]
        request = replace(request, receivers=tuple(ends))
        receipts += await self._begin(request, reached)
        gone = {receipt.replica for receipt in receipts}
        begun = [replica for replica in reached if replica not in gone]
        return receipts + await asyncio.gather(*(self._receive(replica, request, offers) for replica in begun))

    async def _send(self, request: SyncRequest) -> None:
        await self._senders.send(request)
        self.planner.sent(request)

    async def _receive(self, replica: int, request: SyncRequest, offers: Sequence[SyncOffer]) -> SyncReceipt:
        return self._confirmed(request, await self._receivers.receive(replica, request, offers))

    async def _sender_failed(
        self, request: SyncRequest, replicas: Sequence[int], failure: BaseException
    ) -> list[SyncReceipt]:
        reason = f"the sender failed: {failure}"
        await self._receivers.fail(replicas, reason)
        if self._senders.is_lost:
            raise failure
        return [
            self._confirmed(request, SyncReceipt(replica, request.policy_version, "dead", error=reason))
            for replica in replicas
        ]

    def _confirmed(self, request: SyncRequest, receipt: SyncReceipt) -> SyncReceipt:
        for endpoint in request.receivers:
            if endpoint.replica == receipt.replica:
                self.planner.confirm(request, endpoint, receipt)
        return receipt

    def close(self) -> None:
        """Close what this process holds of both ends. Safe to call twice."""
        self._senders.close()
        self._receivers.close()


def _dead(replica: int, policy_version: int, error: BaseException) -> SyncReceipt:
    return SyncReceipt(replica, policy_version, "dead", error=f"{type(error).__name__}: {error}")
