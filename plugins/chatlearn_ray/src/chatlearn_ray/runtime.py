"""The runtime ``ray``: every rank and replica an actor, on this machine or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from chatlearn_core.exceptions import ChatLearnError, RuntimeLostError, TrainerLostError
from chatlearn_core.protocols import Device, LendWeights, RoleIsUp, RuntimeEvent
from chatlearn_core.runtime.local import part_name
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightSyncPlan
from chatlearn_core.runtime.restarts import Restarts
from chatlearn_core.types import SyncReceipt
from chatlearn_ray.affinity import check_reach, seated_role
from chatlearn_ray.blocks import Traffic
from chatlearn_ray.cluster import Cluster, nodes, this_machine
from chatlearn_ray.errors import WorkerDiedError
from chatlearn_ray.generator_fleet import RayGeneratorFleet
from chatlearn_ray.host import WorkerHost
from chatlearn_ray.options import RayRuntimeOptions
from chatlearn_ray.remote import CONTROL, RemoteWorker, all_or_first_error
from chatlearn_ray.reward_group import RayRewardGroup
from chatlearn_ray.seating import Seat, Seating, seat_roles
from chatlearn_ray.trainer_group import RayTrainerGroup
from chatlearn_ray.user_code import collect_code
from chatlearn_ray.weight_transfer import RayWeightTransfer
from chatlearn_ray.worker_spec import PluginChoice, RewardShare, WorkerSpec

_CLOSE_S = 20.0
"""A worker may take this long to close; then its process is ended."""


class RayRuntime:
    """Builds the roles of a plan as groups of Ray actors.

    Nothing of a backend is imported here: workers find the plugins that the driver chose among their own, by name.

    Raises:
        ConfigError: the pools do not fit the roles, or this machine cannot hold them.
    """

    def __init__(self, options: RayRuntimeOptions, plan: RunPlan) -> None:
        self.options = options
        self.plan = plan
        self.cluster = Cluster(options)
        self._seating = self._seat(gpus=None)
        for sync in plan.weight_syncs:
            check_reach(sync, self._seating, options)
        self.cluster.require_room(self._seating)
        self._workers: dict[tuple[str, int], RemoteWorker] = {}
        self._trainers: dict[str, RayTrainerGroup] = {}
        self._fleets: dict[str, RayGeneratorFleet] = {}
        self._rewards: dict[str, RayRewardGroup] = {}
        self._transfers: dict[tuple[str, str], RayWeightTransfer] = {}
        self._driver_host = socket.gethostname()
        self._traffic = Traffic()
        self._directory = str(Path.cwd())
        self._code: Any = None
        """A reference to the ``UserCode`` in the object store."""
        self._trainer_restarts: dict[str, Restarts] = {}
        self.on_event: Callable[[RuntimeEvent], None] | None = None
        self.lend_weights: LendWeights = lambda role: contextlib.nullcontext()

    def _tell(self, event: RuntimeEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def _seat(self, gpus: bool | None) -> Seating:
        """Seats of all roles; ``device: auto`` is a GPU where there are ``gpus`` (None: look at this machine)."""
        if gpus is None:
            gpus = (
                self.options.cluster_address is None and this_machine(self.options, Seating((), ())).get("GPU", 0) > 0
            )
        return seat_roles(
            [seated_role(role, self.plan, self.options, gpus=gpus) for role in self.plan.roles.values()], self.options
        )

    async def start(self, role_is_up: RoleIsUp | None = None) -> None:
        """Join Ray, reserve all places, launch all roles at the same time; if one fails, close the others and raise.

        Given ``role_is_up``, roles that share devices are launched one after the other.
        """
        try:
            self.cluster.join(self._seating, self.plan.run_dir)
            self._code = self._shipped_code()
            self._seating = self._seat(gpus=any(node.get("GPU", 0) > 0 for node in nodes().values()))
            await self.cluster.reserve(self._seating)
            chains = [[role] for role in self.plan.roles] if role_is_up is None else self._roles_by_devices()
            await all_or_first_error([self._start_chain(chain, role_is_up) for chain in chains], grace_s=0.0)
            for sync in self.plan.weight_syncs:
                await self.connect(sync)
        except BaseException:
            await self.close()
            raise

    async def connect(self, sync: WeightSyncPlan) -> None:
        """Open the transport between a trainer and a generator role, in place of the one that they have."""
        transfer = RayWeightTransfer(
            sync,
            PluginChoice.of(self.plan.registry, sync.record, sync.options, "weight_sync"),
            self.plan.run_dir / "weight_sync",
            self._trainers[sync.trainer],
            self._fleets[sync.generator],
        )
        await transfer.open_senders()
        self._transfers[sync.trainer, sync.generator] = transfer

    def _roles_by_devices(self) -> list[list[str]]:
        """Roles that share devices with one another, directly or through others, together."""
        chains: list[tuple[list[str], frozenset[Device]]] = []
        devices = self.devices()
        for role in self.plan.roles:
            own = devices.get(role, frozenset())
            met = [chain for chain in chains if chain[1] & own]
            chains = [chain for chain in chains if chain not in met]
            chains.append(([name for names, _ in met for name in names] + [role], own.union(*(d for _, d in met))))
        return [names for names, _ in chains]

    async def _start_chain(self, names: Sequence[str], role_is_up: RoleIsUp | None) -> None:
        for name in names:
            role = self.plan.roles[name]
            await self._start_role(role)
            if role_is_up is not None and role.kind != "reward":
                await role_is_up(name)

    async def _start_role(self, role: RolePlan) -> None:
        if role.kind == "trainer":
            group = self._trainers[role.name] = RayTrainerGroup(role.name, self._traffic)
            restarts = self._trainer_restarts[role.name] = Restarts(
                role.name,
                self.options.max_trainer_restarts,
                setting="runtime.options.max_trainer_restarts",
                event="trainer_rebuilt",
                error=TrainerLostError,
                tell=self._tell,
                together=True,
            )
            await restarts.start("a rank", partial(self._start_ranks, role, group))
        elif role.kind == "generator":

            async def launch_replica(index: int) -> RemoteWorker:
                return await self._launch_ready(role, index)

            fleet = self._fleets[role.name] = RayGeneratorFleet(
                role.name,
                launch_replica,
                role.replicas,
                role.timeout_s,
                self.options.max_generator_restarts,
                self._traffic,
                self._tell,
            )
            await fleet.start()
        else:

            async def launch_worker(index: int) -> RemoteWorker:
                return await self._launch_ready(role, index)

            rewards = self._rewards[role.name] = RayRewardGroup(
                role.name,
                launch_worker,
                role.replicas,
                self.options.max_reward_restarts,
                self._traffic,
                by_group=any(part.unit == "group" for part in role.backends),
                tell=self._tell,
            )
            await rewards.start()

    async def _start_ranks(self, role: RolePlan, group: RayTrainerGroup) -> None:
        """Launch all ranks of a trainer and let them meet; ranks that are left of an earlier start are ended."""
        for index in range(role.ranks):
            if (left := self._workers.pop((role.name, index), None)) is not None:
                left.kill()
        await group.start(await self._launch_all(role))
        for (trainer, _), transfer in self._transfers.items():
            if trainer == role.name:
                await transfer.open_senders()

    async def _launch_all(self, role: RolePlan) -> list[RemoteWorker]:
        workers: list[RemoteWorker] = await all_or_first_error([self._launch(role, i) for i in range(role.ranks)])
        return workers

    async def _launch_ready(self, role: RolePlan, index: int) -> RemoteWorker:
        worker = await self._launch(role, index)
        worker.facts = await worker.call("setup")
        return worker

    async def _launch(self, role: RolePlan, index: int) -> RemoteWorker:
        """Start the process of one worker and let it find its plugins."""
        if (left := self._workers.pop((role.name, index), None)) is not None:
            left.kill()  # one that did not come up keeps its place for as long as it lives
        self.cluster.check()
        seat = self._seating.of(role.name)[index]
        host: Any = ray.remote(concurrency_groups={CONTROL: 1})(WorkerHost)  # type: ignore[call-overload]  # Ray's stub lacks it
        gpus = await self.cluster.gpus_of(seat)
        options = self.cluster.actor_options(seat)
        actor = host.options(max_restarts=0, **options).remote(
            self._environment(), [entry for entry in sys.path if entry], self._directory, self._code, gpus
        )
        key = f"roles.{role.name}.timeout_s"
        worker = RemoteWorker(
            _label(role, index), actor, role.timeout_s, key, self.options.heartbeat_timeout_s, self.cluster.lost
        )
        self._workers[role.name, index] = worker
        spec = replace(self._spec(role, index), gpus=gpus.ids if gpus is not None else ())
        await worker.start(spec, self.options.start_timeout_s)
        return worker

    def _shipped_code(self) -> Any:
        """The Python files of this directory, where workers may be on machines that do not have it.

        With a ``working_dir``, of the runtime or of a job, Ray itself brings the code.
        """
        options = self.options
        if options.cluster_address is None or not options.ship_code or options.working_dir is not None:
            return None
        if ray.get_runtime_context().runtime_env.get("working_dir"):
            return None
        return ray.put(collect_code(Path(self._directory)))

    def _environment(self) -> dict[str, str]:
        """What workers inherit from the driver wherever they are."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        threads = {} if self.options.num_threads is None else {"OMP_NUM_THREADS": str(self.options.num_threads)}
        return inherited | threads | self.options.environment

    def _spec(self, role: RolePlan, index: int) -> WorkerSpec:
        is_trainer = role.kind == "trainer"
        context = self.plan.context(
            role, replica=0 if is_trainer else index, rank=index if is_trainer else 0, device=role.device
        )
        spec = WorkerSpec(
            role.kind, context, role.timeout_s, num_threads=self.options.num_threads, driver_host=self._driver_host
        )
        if role.kind == "reward":
            shares = tuple(
                RewardShare(part_name(role, part.key), self._choice(part), part.weight, part.data_sources, part.unit)
                for part in role.backends
            )
            return replace(spec, shares=shares)
        return replace(spec, plugin=self._choice(role.backend))

    def _choice(self, backend: BackendPlan) -> PluginChoice:
        return PluginChoice.of(self.plan.registry, backend.record, backend.options, backend.key)

    def trainer(self, role: str) -> RayTrainerGroup:
        """The trainer group of a role."""
        return self._trainers[role]

    def generator(self, role: str) -> RayGeneratorFleet:
        """The generator fleet of a role."""
        return self._fleets[role]

    def reward(self, role: str) -> RayRewardGroup:
        """The reward group of a role."""
        return self._rewards[role]

    async def sync_weights(self, trainer: str, generator: str, policy_version: int) -> list[SyncReceipt]:
        """Move the trainer's weights into every replica. A replica that fails is rebuilt and gets them once more."""
        fleet = self._fleets[generator]
        transfer = self._transfers[trainer, generator]

        async def transfer_to(index: int) -> SyncReceipt:
            async with self.lend_weights(trainer):
                return await transfer.resync(index, policy_version)

        return await fleet.sync(
            policy_version, lambda: transfer.sync(range(fleet.num_replicas), policy_version), transfer_to
        )

    async def recover(self, lost: TrainerLostError) -> None:
        """End the remaining ranks of every broken trainer, and build it anew on the same places; then also the replicas
        that were given up because it died while it sent them weights.
        """
        broken = [name for name, group in self._trainers.items() if group.is_broken]
        for name in broken:
            build = partial(self._start_ranks, self.plan.roles[name], self._trainers[name])
            await self._trainer_restarts[name].rebuild("a rank", lost, build)
        if not broken:  # what was lost is not a process but data that it was to train on: no less bounded
            next(iter(self._trainer_restarts.values())).spend("what it was to train on", lost)
        for fleet in self._fleets.values():
            await fleet.rebuild_given_up()

    def devices(self) -> Mapping[str, frozenset[Device]]:
        """The GPUs that the workers see, once they run; slots before, and on the host."""
        return {
            role.name: frozenset(device for seat in self._seating.of(role.name) for device in self._devices_of(seat))
            for role in self.plan.roles.values()
            if role.kind != "reward"
        }

    def _devices_of(self, seat: Seat) -> Sequence[Device]:
        worker = self._workers.get((seat.role, seat.worker))
        facts = worker.facts if worker is not None else None
        if facts is None or not facts.gpus:
            return seat.devices
        return [Device(f"{facts.host}, GPU {gpu}", is_gpu=True) for gpu in facts.gpus]

    def describe(self) -> Mapping[str, Any]:
        """Every role with its backend, and the seat of each of its workers; processes once they run."""
        described: dict[str, Any] = {}
        for role in self.plan.roles.values():
            places = []
            for seat in self._seating.of(role.name):
                worker = self._workers.get((role.name, seat.worker))
                facts = worker.facts if worker is not None else None
                running = f" -> process {facts.pid} on {facts.host}, {facts.device}" if facts is not None else ""
                places.append(f"{_label(role, seat.worker).split(', ')[1]}: {seat.text}{running}")
            places += [f"kept together: {reason}" for reason in self._seating.why(role.name)]
            described[role.name] = {
                "kind": role.kind,
                "backend": " + ".join(backend.record.name for backend in role.backends),
                "places": places,
            }
        return described

    async def close(self) -> None:
        """Close all workers, then end their processes; what fails while closing is raised after everything is gone."""
        workers, self._workers = self._workers, {}
        for group in self._trainers.values():
            if group.is_broken:  # its ranks may hang in a collective: no use to ask them
                for worker in group.workers:
                    worker.kill()
        replicas = [replica for fleet in self._fleets.values() for replica in fleet.replicas]
        for replica in replicas:
            replica.stop()
        self._transfers, self._fleets, self._trainers, self._rewards = {}, {}, {}, {}
        outcomes = await asyncio.gather(*(_close(worker) for worker in workers.values()), return_exceptions=True)
        self.cluster.leave()
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        if problems:
            raise ChatLearnError("closing failed for " + "; ".join(problems))


_INHERITED = (
    "CHATLEARN_DISABLE_PLUGINS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
"""Variables of the driver that change what workers compute or find."""


async def _close(worker: RemoteWorker) -> None:
    try:
        if worker.facts is not None:
            await worker.call("close", timeout_s=_CLOSE_S)
    except (WorkerDiedError, RuntimeLostError):
        pass  # it is closed
    finally:
        worker.kill()


def _label(role: RolePlan, index: int) -> str:
    if role.kind == "trainer":
        return f"role {role.name!r}, rank {index} of {role.ranks}"
    return f"role {role.name!r}, {'replica' if role.kind == 'generator' else 'worker'} {index}"
