"""Refreshes trainer roles with the weights of a trained role, such as a reference that follows the policy."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.device_sharing import DeviceUse, sync_uses
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import RefreshingRuntime, Runtime
from chatlearn_core.runtime.plan import RolePlan
from chatlearn_core.types import Metric, Metrics


class RoleRefresher:
    """Moves weights between trainers: by weight sync where the plan has a route, else as a Hugging Face model
    directory, which works for any backends and layouts.

    Args:
        roles: the planned roles.
        workspace: parent of these directories while they are read; visible to all workers.
    """

    def __init__(
        self, runtime: Runtime, roles: Mapping[str, RolePlan], colocation: ColocationManager, workspace: Path
    ) -> None:
        self._runtime = runtime
        self._colocation = colocation
        self._workspace = workspace
        self._refreshes = {name: role.refresh for name, role in roles.items() if role.refresh is not None}
        self._models = {name: role.model for name, role in roles.items()}

    @property
    def roles(self) -> tuple[str, ...]:
        """The refreshed roles, whose weights belong in checkpoints."""
        return tuple(self._refreshes)

    async def refresh(self, step: int, timers: Timers) -> Metrics:
        """Make the refreshes that are due after a step: weight syncs first; then each other source exports once, and
        its followers load.

        Raises:
            BackendError, ModelError, WeightSyncError: the weights do not fit; names the role.
        """
        due = {name: refresh for name, refresh in self._refreshes.items() if refresh.is_due(step)}
        by_directory = {
            name: refresh
            for name, refresh in due.items()
            if refresh.route is None or not await self._sync(refresh.role, name, step, timers)
        }
        for source in dict.fromkeys(refresh.role for refresh in by_directory.values()):
            directory = self._workspace / source
            shutil.rmtree(directory, ignore_errors=True)  # left over from a killed run
            try:
                async with self._colocation.lease(DeviceUse(source, "export"), timers=timers):
                    with timers.measure("refresh", role=source, action="export"):
                        await self._runtime.trainer(source).export_model(directory)
                for name, refresh in by_directory.items():
                    if refresh.role == source:
                        await self._load(name, directory, refresh.decay, timers)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        return {"training/refreshed_roles": Metric(len(due), reducer="sum")} if due else {}

    async def begin_anew(self, learners: Iterable[str], timers: Timers) -> None:
        """Reset every role whose weights have changed to its own model, because the run restarts from its beginning.

        Rebuilt roles already hold their own model; the others still hold their trained weights.
        """
        for name in (*learners, *self._refreshes):
            model = self._models[name]
            assert model is not None, "a trainer role has a model"
            await self._load(name, Path(model.path), 0.0, timers)

    async def _sync(self, source: str, name: str, step: int, timers: Timers) -> bool:
        """Whether the weights could be brought over the route."""
        runtime = cast("RefreshingRuntime", self._runtime)  # the plan has routes for such runtimes only
        async with self._colocation.lease(*sync_uses(source, name), timers=timers):
            with timers.measure("refresh", role=name, action="sync"):
                return await runtime.refresh_weights(source, name, step)

    async def _load(self, name: str, directory: Path, decay: float, timers: Timers) -> None:
        async with self._colocation.lease(DeviceUse(name, "load"), timers=timers):
            with timers.measure("refresh", role=name, action="load_model"):
                await self._runtime.trainer(name).load_model(directory, decay=decay)
