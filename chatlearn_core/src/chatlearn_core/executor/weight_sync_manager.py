"""Weight sync: the generators load the weights of the trained roles under a new policy version."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence

from chatlearn_core.exceptions import ContractError
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import sync_uses
from chatlearn_core.executor.metrics_line import sync_metrics
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.observers import Observers
from chatlearn_core.protocols import Runtime
from chatlearn_core.runtime.plan import WeightRoute
from chatlearn_core.types import Metrics, SyncReceipt, merge_metrics


class WeightSyncManager:
    """Syncs weights from trainers to generators along the planned routes, and counts policy versions.

    Args:
        runtime: moves the weights.
        routes: pairs of trainer and generator.
        colocation: leases the devices of both ends.
        observers: notified of every sync.
        started: the routes whose roles were started; None: all. Along another nothing moves, but versions count.
    """

    def __init__(
        self,
        runtime: Runtime,
        routes: Sequence[WeightRoute],
        colocation: ColocationManager,
        observers: Observers,
        *,
        started: Sequence[WeightRoute] | None = None,
    ) -> None:
        self.runtime = runtime
        self.routes = tuple(routes)
        self.started_routes = tuple(routes if started is None else started)
        self.colocation = colocation
        self.observers = observers

    @contextlib.asynccontextmanager
    async def updating(self, state: RunState, learned: Collection[str]) -> AsyncIterator[None]:
        """During the block the weights of these roles change; no generator gets them under a version. After an error
        this holds until the next sync.
        """
        targets = [route.target for route in self.started_routes if route.trainer in learned]
        for target in targets:
            await self.runtime.generator(target).hold_rebuilds()
        yield
        for target in targets:
            await self.runtime.generator(target).release_rebuilds(state.policy_version + 1)

    async def publish(self, state: RunState, learned: Collection[str], timers: Timers) -> Metrics:
        """After updates: raise the policy version, and sync it to the generators of the updated roles.

        If none of these roles has a generator, nothing moves and the version stays.

        Raises:
            WeightSyncError: no replica serves the new version.
        """
        routes = [route for route in self.routes if route.trainer in learned]
        if not routes:
            return {}
        state.policy_version += 1
        return await self._sync(routes, state.policy_version, timers)

    async def republish(self, state: RunState, timers: Timers) -> Metrics:
        """Sync the trainers' weights to every generator under their current version, after a start or a return to a
        checkpoint.

        Raises:
            WeightSyncError: no replica serves the version.
        """
        return await self.publish_version(state.policy_version, timers)

    async def publish_version(self, version: int, timers: Timers) -> Metrics:
        """Sync the trainers' weights to every generator under this version.

        Raises:
            WeightSyncError: no replica serves the version.
        """
        return await self._sync(self.routes, version, timers)

    async def _sync(self, routes: Sequence[WeightRoute], version: int, timers: Timers) -> Metrics:
        metrics: Metrics = {}
        for route in (route for route in routes if route in self.started_routes):
            async with self.colocation.lease(*sync_uses(route.trainer, route.target), timers=timers):
                with timers.measure("sync", role=route.trainer) as facts:
                    facts["to"] = route.target
                    receipts = await self.runtime.sync_weights(route.trainer, route.target, version)
            if not receipts or not all(isinstance(receipt, SyncReceipt) for receipt in receipts):
                raise ContractError(
                    f"weight sync of role {route.trainer!r} to {route.target!r}: the runtime returned "
                    f"{receipts!r:.80}; sync_weights returns a receipt for each replica"
                )
            self.observers.weights_synced(version, receipts)
            metrics = merge_metrics(metrics, sync_metrics(receipts))
        return metrics
