"""The driver's side of a run over worker processes, independent of the framework that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ChatLearnError, RuntimeLostError, TrainerLostError
from chatlearn_core.protocols import AskGenerator, Device, LendWeights, RoleIsUp, RuntimeEvent
from chatlearn_core.runtime.plan import BackendPlan, RolePlan, RunPlan, WeightRoute
from chatlearn_core.types import SyncReceipt
from chatlearn_runtime_kit.environments import EnvironmentRole
from chatlearn_runtime_kit.restart_budget import RestartBudget
from chatlearn_runtime_kit.rewards import part_name
from chatlearn_runtime_kit.role_handles import RoleCalls
from chatlearn_runtime_kit.weight_ends import require_taken, sync_workspace
from chatlearn_runtime_kit.weight_transfer import WeightTransfer
from chatlearn_workers.blocks import BlockStore, Traffic
from chatlearn_workers.environment_group import RemoteEnvironments
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.generator_fleet import RemoteGeneratorFleet
from chatlearn_workers.options import WorkersOptions
from chatlearn_workers.remote import RemoteWorker, all_or_first_error
from chatlearn_workers.reward_group import RemoteRewardGroup
from chatlearn_workers.rpc import ObjectStore, WorkerHandle
from chatlearn_workers.trainer_group import RemoteTrainerGroup
from chatlearn_workers.weight_ends import RemoteFollower, RemoteReceivers, RemoteSenders, SharedRequest
from chatlearn_workers.worker_spec import PluginChoice, RewardShare, WorkerSpec

_CLOSE_S = 20.0
"""Time for a worker to close, seconds; after it its process is killed."""
_INHERITED = (
    "CHATLEARN_DISABLE_PLUGINS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
"""Environment variables of the driver that affect what workers compute or find."""


class WorkersRuntime(ABC):
    """Builds the roles of a plan as groups of worker processes.

    Imports no backend: each worker finds the driver's plugins by name among its own.

    Args:
        options: how workers are started and rebuilt.
        plan: the roles to build.
        store: used by workers and driver to exchange arrays.
    """

    def __init__(self, options: WorkersOptions, plan: RunPlan, store: ObjectStore) -> None:
        self.options = options
        self.plan = plan
        self.store = store
        self.workers: dict[tuple[str, int], RemoteWorker] = {}
        """(role, rank or replica) -> worker."""
        self._trainers: dict[str, RemoteTrainerGroup] = {}
        self._fleets: dict[str, RemoteGeneratorFleet] = {}
        self._rewards: dict[str, RemoteRewardGroup] = {}
        self._environments: dict[str, RemoteEnvironments] = {}
        self._transfers: dict[tuple[str, str], WeightTransfer] = {}
        self._senders: dict[tuple[str, str], RemoteSenders] = {}
        self._traffic = Traffic()
        self.data = BlockStore(self._traffic)
        self._directory = str(Path.cwd())
        self._trainer_restart_budgets: dict[str, RestartBudget] = {}
        self.on_event: Callable[[RuntimeEvent], None] | None = None
        self.lend_weights: LendWeights = lambda role: contextlib.nullcontext()
        self.ask_generator: AskGenerator = lambda role, request: self.generator(role).generate(request)

    # Implemented by each framework

    @abstractmethod
    async def _open(self) -> None:
        """Connect to the machines, and reserve a place for every worker."""

    @abstractmethod
    async def _start_process(self, role: RolePlan, index: int) -> WorkerHandle:
        """Start a process at this worker's place that hosts a ``WorkerHost`` with ``_host_arguments``."""

    @abstractmethod
    def _leave(self) -> None:
        """Release everything from ``_open``; all workers' processes have ended before. Safe to call twice."""

    @abstractmethod
    def _planned_devices(self, role: RolePlan, index: int) -> Sequence[Device]:
        """Devices that a worker will occupy, as far as known before it runs."""

    @abstractmethod
    def _place_text(self, role: RolePlan, index: int) -> str:
        """A worker's place and resources, as text."""

    def _notes(self, role: RolePlan) -> Sequence[str]:
        """Further remarks on a role's places."""
        return ()

    @property
    def _lost(self) -> asyncio.Future[str] | None:
        """Done, with a sentence, once the basis of all workers is gone."""
        return None

    # Runtime

    async def start(self, role_is_up: RoleIsUp | None = None) -> None:
        """Reserve all places and launch all roles concurrently; if one fails, close the others and raise.

        With ``role_is_up``, roles that share devices are launched one after another.
        """
        try:
            await self._open()
            chains = [[role] for role in self.plan.roles] if role_is_up is None else self._roles_by_devices()
            await all_or_first_error([self._start_chain(chain, role_is_up) for chain in chains], grace_s=0.0)
            await self._connect_all(role_is_up)
        except BaseException:
            await self.close()
            raise

    async def _connect_all(self, role_is_up: RoleIsUp | None) -> None:
        """Open every transport. A trainer that is lost meanwhile is rebuilt, as often as its restarts allow."""
        connects = [partial(self.connect, route) for route in self.plan.weight_syncs]
        for role in self.plan.roles.values():
            if role.refresh is not None and role.refresh.route is not None:
                connects.append(partial(self._connect_follower, role.refresh.route, role.refresh.decay))
        while connects:
            try:
                await connects[0]()
            except TrainerLostError as lost:
                broken = self._broken_trainers()
                await self.recover(lost)
                if role_is_up is not None:
                    for name in broken:
                        await role_is_up(name)
            else:
                del connects[0]

    async def connect(self, route: WeightRoute) -> None:
        """Open the transport between a trainer and a generator role, replacing an existing one."""
        key, shared = f"{route.trainer}->{route.target}", SharedRequest(self.store)
        plugin = PluginChoice.of(self.plan.registry, route.record, route.options, "weight_sync")
        senders = RemoteSenders(key, plugin, shared, self._trainers[route.trainer])
        receivers = RemoteReceivers(key, plugin, shared, self._fleets[route.target])
        await senders.open()
        self._senders[route.trainer, route.target] = senders
        workspace = sync_workspace(self.plan, route)
        self._transfers[route.trainer, route.target] = WeightTransfer(route, workspace, senders, receivers)

    async def _connect_follower(self, route: WeightRoute, decay: float) -> None:
        """Open the transport between two trainers, unless the follower's model cannot take tensors one at a time."""
        key, shared = f"{route.trainer}->{route.target}", SharedRequest(self.store)
        plugin = PluginChoice.of(self.plan.registry, route.record, route.options, "weight_sync")
        follower = RemoteFollower(key, plugin, shared, self._trainers[route.target], decay)
        if not await follower.open():
            return
        senders = RemoteSenders(key, plugin, shared, self._trainers[route.trainer])
        await senders.open()
        self._senders[route.trainer, route.target] = senders
        workspace = sync_workspace(self.plan, route)
        self._transfers[route.trainer, route.target] = WeightTransfer(route, workspace, senders, follower)

    def trainer(self, role: str) -> RemoteTrainerGroup:
        """The trainer group of a role."""
        return self._trainers[role]

    def generator(self, role: str) -> RemoteGeneratorFleet:
        """The generator fleet of a role."""
        return self._fleets[role]

    def reward(self, role: str) -> RemoteRewardGroup:
        """The reward group of a role."""
        return self._rewards[role]

    def environment(self, role: str) -> RemoteEnvironments:
        """The environments of a role, in the driver's process."""
        return self._environments[role]

    async def sync_weights(self, trainer: str, generator: str, policy_version: int) -> list[SyncReceipt]:
        """Load the trainer's weights into every replica. A replica that fails is rebuilt and gets them again."""
        fleet = self._fleets[generator]
        transfer = self._transfers[trainer, generator]

        async def transfer_to(index: int, version: int) -> SyncReceipt:
            async with self.lend_weights(trainer):
                return await transfer.resync(index, version)

        return await fleet.sync(
            policy_version,
            lambda: transfer.sync(range(fleet.num_replicas), policy_version),
            transfer_to,
            transfer.keeps,
        )

    async def refresh_weights(self, trainer: str, follower: str, step: int) -> bool:
        """See ``RefreshingRuntime``."""
        transfer, group = self._transfers.get((trainer, follower)), self._trainers[follower]
        if transfer is None:
            return False
        group.require_whole("take weights")
        receipts = await transfer.sync(range(len(group.workers)), step)
        group.require_whole("go on after a refresh")
        require_taken(receipts, transfer.route)
        return True

    async def recover(self, lost: TrainerLostError) -> None:
        """End the remaining ranks of every broken trainer and rebuild it in the same places; then also rebuild replicas
        that were given up because the trainer died while sending them weights.
        """
        broken = self._broken_trainers()
        for name in broken:
            build = partial(self._start_ranks, self.plan.roles[name], self._trainers[name])
            await self._trainer_restart_budgets[name].rebuild("a rank", lost, build)
        if not broken:  # training data was lost rather than a process; the restart limit applies, too
            next(iter(self._trainer_restart_budgets.values())).spend("what it was to train on", lost)
        for fleet in self._fleets.values():
            await fleet.rebuild_given_up()

    def _broken_trainers(self) -> list[str]:
        return [name for name, group in self._trainers.items() if group.is_broken]

    def devices(self) -> Mapping[str, frozenset[Device]]:
        """The GPUs that running workers see; before that, and on the host, the planned devices."""
        return {
            role.name: frozenset(
                device for index in range(num_workers(role)) for device in self._devices_of(role, index)
            )
            for role in self.plan.roles.values()
            if role.holds_a_model
        }

    def describe(self) -> Mapping[str, Any]:
        """Every role with its backend and its workers' places, and with their processes once they run."""
        described: dict[str, Any] = {}
        for role in self.plan.roles.values():
            places = []
            for index in range(num_workers(role)):
                worker = self.workers.get((role.name, index))
                facts = worker.facts if worker is not None else None
                running = f" -> process {facts.pid} on {facts.host}, {facts.device}" if facts is not None else ""
                places.append(f"{_worker_name(role, index)}: {self._place_text(role, index)}{running}")
            described[role.name] = {
                "kind": role.kind,
                "backend": " + ".join(backend.record.name for backend in role.backends),
                "places": [*places, *self._notes(role)],
            }
        return described

    async def close(self) -> None:
        """Close all workers, then end their processes; errors while closing are raised after everything is gone."""
        workers, self.workers = self.workers, {}
        for group in self._trainers.values():
            if group.is_broken:  # its ranks may hang in a collective, so closing calls would hang, too
                for worker in group.workers:
                    worker.kill()
        replicas = [replica for fleet in self._fleets.values() for replica in fleet.replicas]
        for replica in replicas:
            replica.stop()
        self._transfers, self._senders = {}, {}
        self._fleets, self._trainers, self._rewards = {}, {}, {}
        self._environments = {}
        outcomes = await asyncio.gather(
            *(_close(worker) for worker in workers.values()),
            return_exceptions=True,
        )
        self._leave()
        problems = [str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)]
        if problems:
            raise ChatLearnError("closing failed for " + "; ".join(problems))

    # Starting workers

    def _tell(self, event: RuntimeEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def _roles_by_devices(self) -> list[list[str]]:
        """Groups of roles that share devices, directly or through others."""
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
            if role_is_up is not None and role.holds_a_model:
                await role_is_up(name)

    async def _start_role(self, role: RolePlan) -> None:
        options, launch = self.options, partial(self._launch_ready, role)
        if role.kind == "trainer":
            group = self._trainers[role.name] = RemoteTrainerGroup(
                role.name, self.store, self.plan.registry.outputs, self._traffic
            )
            budget = self._trainer_restart_budgets[role.name] = RestartBudget(
                role.name,
                options.max_trainer_restarts,
                setting="runtime.options.max_trainer_restarts",
                event="trainer_rebuilt",
                error=TrainerLostError,
                tell=self._tell,
                together=True,
            )
            await budget.start("a rank", partial(self._start_ranks, role, group))
        elif role.kind == "generator":
            fleet = self._fleets[role.name] = RemoteGeneratorFleet(
                role.name,
                launch,
                role.replicas,
                role.timeout_s,
                options.max_generator_restarts,
                self.store,
                self._traffic,
                self._tell,
            )
            await fleet.start()
        elif role.kind == "environment":
            environments = self._environments[role.name] = RemoteEnvironments(
                role.name, launch, role.replicas, options.max_environment_restarts, self._tell
            )
            await environments.start()
        else:
            rewards = self._rewards[role.name] = RemoteRewardGroup(
                role.name,
                launch,
                role.replicas,
                options.max_reward_restarts,
                self._traffic,
                by_group=any(part.unit == "group" for part in role.backends),
                ask=RoleCalls(role, self.plan, self).ask if role.used_roles else None,
                tell=self._tell,
            )
            await rewards.start()

    async def _start_ranks(self, role: RolePlan, group: RemoteTrainerGroup) -> None:
        """Launch all ranks of a trainer and let them form a group; ranks left from an earlier start are ended."""
        for index in range(role.ranks):
            self._end(role, index)
        await group.start(await all_or_first_error([self._launch(role, i) for i in range(role.ranks)]))
        for (trainer, _), senders in self._senders.items():
            if trainer == role.name:
                await senders.open()

    async def _launch_ready(self, role: RolePlan, index: int) -> RemoteWorker:
        worker = await self._launch(role, index)
        worker.facts = await worker.call("setup")
        return worker

    async def _launch(self, role: RolePlan, index: int) -> RemoteWorker:
        """Start the process of one worker and let it find its plugins."""
        self._end(role, index)  # a worker that failed to start occupies its place until it ends
        if self._lost is not None and self._lost.done():
            raise RuntimeLostError(self._lost.result())
        worker = RemoteWorker(
            f"role {role.name!r}, {_worker_name(role, index)}",
            await self._start_process(role, index),
            role.timeout_s,
            f"roles.{role.name}.timeout_s",
            self.options.heartbeat_timeout_s,
            self._lost,
        )
        self.workers[role.name, index] = worker
        await worker.start(self._spec(role, index), self.options.start_timeout_s)
        return worker

    def _end(self, role: RolePlan, index: int) -> None:
        if (left := self.workers.pop((role.name, index), None)) is not None:
            left.kill()

    def _host_arguments(self) -> tuple[dict[str, str], list[str], str]:
        """Environment, module path and directory of the driver, for every ``WorkerHost``."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        threads = {} if self.options.num_threads is None else {"OMP_NUM_THREADS": str(self.options.num_threads)}
        environment = inherited | threads | self.options.environment
        return environment, [entry for entry in sys.path if entry], self._directory

    def _spec(self, role: RolePlan, index: int) -> WorkerSpec:
        is_trainer = role.kind == "trainer"
        context = self.plan.context(
            role, replica=0 if is_trainer else index, rank=index if is_trainer else 0, device=role.device
        )
        spec = WorkerSpec(
            role.kind,
            context,
            role.timeout_s,
            num_threads=self.options.num_threads,
            driver_host=socket.gethostname(),
        )
        if role.kind == "reward":
            shares = tuple(
                RewardShare(
                    part_name(role, part.key),
                    self._choice(part),
                    part.weight,
                    part.data_sources,
                    part.unit,
                    self.plan.used_by(part),
                    part.gate,
                )
                for part in role.backends
            )
            return replace(spec, shares=shares)
        environment = EnvironmentRole.of(role, self.plan) if role.kind == "environment" else None
        return replace(spec, plugin=self._choice(role.backend), environment=environment)

    def _choice(self, backend: BackendPlan) -> PluginChoice:
        return PluginChoice.of(self.plan.registry, backend.record, backend.options, backend.key)

    def _devices_of(self, role: RolePlan, index: int) -> Sequence[Device]:
        worker = self.workers.get((role.name, index))
        facts = worker.facts if worker is not None else None
        if facts is None or not facts.gpus:
            return self._planned_devices(role, index)
        return [Device(f"{facts.host}, GPU {gpu}", is_gpu=True) for gpu in facts.gpus]


def num_workers(role: RolePlan) -> int:
    """Number of processes of a role: one per rank of a trainer, or per replica of another role."""
    return role.ranks if role.kind == "trainer" else role.replicas


def _worker_name(role: RolePlan, index: int) -> str:
    if role.kind == "trainer":
        return f"rank {index} of {role.ranks}"
    return f"{'replica' if role.kind == 'generator' else 'worker'} {index}"


async def _close(worker: RemoteWorker) -> None:
    try:
        if worker.facts is not None:
            await worker.call("close", timeout_s=_CLOSE_S)
    except (WorkerDiedError, RuntimeLostError):
        pass  # already closed
    finally:
        worker.kill()
