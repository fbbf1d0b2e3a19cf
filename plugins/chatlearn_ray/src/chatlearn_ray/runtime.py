"""The runtime ``ray``: every rank and replica is an actor, on this machine or a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.protocols import Device
from chatlearn_core.runtime.plan import RolePlan, RunPlan
from chatlearn_ray.actor import CONTROL, ActorHandle, ActorHost, RayStore
from chatlearn_ray.affinity import check_reach, placed_role
from chatlearn_ray.cluster import Cluster, nodes, this_machine
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.placement import PlacementPlan, WorkerPlacement, place_roles
from chatlearn_workers.runtime import WorkersRuntime
from chatlearn_workers.user_code import collect_code


class RayRuntime(WorkersRuntime):
    """Starts workers as Ray actors, in slots that are reserved together.

    Raises:
        ConfigError: the pools do not fit the roles, or this machine cannot hold them.
    """

    options: RayRuntimeOptions

    def __init__(self, options: RayRuntimeOptions, plan: RunPlan) -> None:
        super().__init__(options, plan, RayStore())
        self.cluster = Cluster(options)
        self._placement_plan = self._place(gpus=None)
        for route in plan.weight_syncs:
            check_reach(route, self._placement_plan, options)
        self.cluster.require_room(self._placement_plan)
        self._code: Any = None
        """Reference to the ``UserCode`` in the object store."""

    def _place(self, gpus: bool | None) -> PlacementPlan:
        """Place all roles; ``device: auto`` means a GPU if ``gpus`` is true (None: if this machine has one)."""
        if gpus is None:
            gpus = (
                self.options.cluster_address is None
                and this_machine(self.options, PlacementPlan((), ())).get("GPU", 0) > 0
            )
        return place_roles(
            [placed_role(role, self.plan, self.options, gpus=gpus) for role in self.plan.roles.values()],
            self.options,
        )

    async def _open(self) -> None:
        """Join Ray and reserve all places."""
        self.cluster.join(self._placement_plan, self.plan.run_dir)
        self._code = self._shipped_code()
        self._placement_plan = self._place(gpus=any(node.get("GPU", 0) > 0 for node in nodes().values()))
        await self.cluster.reserve(self._placement_plan)

    async def _start_process(self, role: RolePlan, index: int) -> ActorHandle:
        placement = self._placement(role, index)
        host: Any = ray.remote(concurrency_groups={CONTROL: 1})(ActorHost)  # type: ignore[call-overload]  # Ray's stub lacks it
        gpus = await self.cluster.gpus_of(placement)
        options = self.cluster.actor_options(placement)
        actor = host.options(max_restarts=0, **options).remote(*self._host_arguments(), self._code, gpus)
        return ActorHandle(actor)

    def _leave(self) -> None:
        self.cluster.leave()

    @property
    def _lost(self) -> asyncio.Future[str] | None:
        return self.cluster.lost

    def _shipped_code(self) -> Any:
        """Return this directory's Python files, if workers may run on machines without it; otherwise None.

        With a ``working_dir``, of the runtime or of a job, Ray itself distributes the code.
        """
        options = self.options
        if options.cluster_address is None or not options.ship_code or options.working_dir is not None:
            return None
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            return None
        return ray.put(collect_code(Path(self._directory)))

    def _placement(self, role: RolePlan, index: int) -> WorkerPlacement:
        return self._placement_plan.of(role.name)[index]

    def _planned_devices(self, role: RolePlan, index: int) -> Sequence[Device]:
        """Return slots as devices if Ray will choose the GPUs in them."""
        return self._placement(role, index).devices

    def _place_text(self, role: RolePlan, index: int) -> str:
        return self._placement(role, index).text

    def _notes(self, role: RolePlan) -> Sequence[str]:
        return [f"kept together: {reason}" for reason in self._placement_plan.why(role.name)]
