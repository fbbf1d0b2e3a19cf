"""The default runtime: every role in this process, on this machine's CPU or one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chatlearn_core.exceptions import (
    BackendTimeoutError,
    ChatLearnError,
    ConfigError,
    TrainerLostError,
)
from chatlearn_core.protocols import (
    AskGenerator,
    Device,
    LendWeights,
    PlainData,
    RoleIsUp,
    RuntimeEvent,
)
from chatlearn_core.runtime.health import problem_of
from chatlearn_core.runtime.model_families import tokenizer_of
from chatlearn_core.runtime.plan import RolePlan, RunPlan, WeightRoute
from chatlearn_core.runtime.serial_executor import SerialExecutor
from chatlearn_core.types import (
    SyncReceipt,
)
from chatlearn_local.fleet import LocalFleet
from chatlearn_local.options import LocalRuntimeOptions
from chatlearn_local.trainer import LocalTrainer
from chatlearn_local.weight_ends import Follower, LocalReceivers, LocalSenders, ReceivingFleet
from chatlearn_runtime_kit.devices import resolve_device
from chatlearn_runtime_kit.environments import EnvironmentRole, LocalEnvironments
from chatlearn_runtime_kit.rewards import CombinedReward, RewardPart, part_name
from chatlearn_runtime_kit.role_handles import RoleCalls, build_handles, environment_handles
from chatlearn_runtime_kit.weight_ends import loader_of, require_taken, sync_workspace
from chatlearn_runtime_kit.weight_transfer import WeightTransfer

_STOP_S = 10.0
"""Time for a running call to return when the run ends, seconds; after it the thread is abandoned."""


class LocalRuntime:
    """Builds the roles of a plan in this process.

    Raises:
        ConfigError: a role wants several ranks, but one process hosts only one.
    """

    def __init__(self, options: LocalRuntimeOptions, plan: RunPlan) -> None:
        self.options = options
        self.plan = plan
        self.on_event: Callable[[RuntimeEvent], None] | None = None
        self.data = PlainData()
        self.lend_weights: LendWeights = lambda role: contextlib.nullcontext()
        self.ask_generator: AskGenerator = lambda role, request: self.generator(role).generate(request)
        for role in plan.roles.values():
            if role.ranks > 1:
                raise ConfigError(
                    f"roles.{role.name}.ranks is {role.ranks}, but the runtime 'local' hosts one rank a role, in this "
                    "process. Set ranks to 1, or choose a distributed runtime"
                )
        self._trainers: dict[str, LocalTrainer] = {}
        self._fleets: dict[str, LocalFleet] = {}
        self._rewards: dict[str, CombinedReward] = {}
        self._environments: dict[str, LocalEnvironments] = {}
        self._transfers: dict[tuple[str, str], WeightTransfer] = {}
        self._executors: list[SerialExecutor] = []

    def _tell(self, event: RuntimeEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    async def start(self, role_is_up: RoleIsUp | None = None) -> None:
        """Build all roles, one after another; if one does not start, close the others and raise."""
        if self.options.num_threads is not None:
            torch.set_num_threads(self.options.num_threads)
        try:
            for role in self.plan.roles.values():
                await self._start_role(role)
                if role_is_up is not None and role.holds_a_model:
                    await role_is_up(role.name)
            for sync in self.plan.weight_syncs:
                await self.connect(sync)
            for role in self.plan.roles.values():
                if role.refresh is not None and role.refresh.route is not None:
                    trainer = self._trainers[role.name].trainer
                    loader = loader_of(trainer, role.refresh.decay, role.origin)
                    if loader is not None:
                        self._connect(role.refresh.route, Follower(loader))
        except BaseException:
            await self.close()
            raise

    async def connect(self, sync: WeightRoute) -> None:
        """Open the transport between a trainer and a generator role, replacing an existing one."""
        self._connect(sync, self._fleets[sync.target])

    def _connect(self, sync: WeightRoute, receiving: ReceivingFleet) -> None:
        former = self._transfers.pop((sync.trainer, sync.target), None)
        if former is not None:
            former.close()
        registry = self.plan.registry
        self._transfers[sync.trainer, sync.target] = WeightTransfer(
            sync,
            sync_workspace(self.plan, sync),
            LocalSenders(sync, registry, self._trainers[sync.trainer]),
            LocalReceivers(sync, registry, receiving),
        )

    async def _start_role(self, role: RolePlan) -> None:
        if role.kind == "trainer":
            executor = self._executor(role)
            trainer = self._build(role)(0)
            self._trainers[role.name] = LocalTrainer(role.name, trainer, executor)
            await executor.run("setup", trainer.setup)
            executor.health = partial(problem_of, trainer)
        elif role.kind == "generator":
            executor = self._executor(role)
            fleet = LocalFleet(
                role.name, self._build(role), role.replicas, executor, self.options.max_generator_restarts, self._tell
            )
            self._fleets[role.name] = fleet
            await fleet.start()
        elif role.kind == "environment":
            tokenizer = tokenizer_of(self.plan.registry, role)
            build = self.plan.registry.load_factory(role.backend.record)
            hosted = EnvironmentRole.of(role, self.plan)
            handles = environment_handles(role.name, hosted.uses, self.plan.registry)
            environment = build(role.backend.options, replace(self.plan.context(role), handles=handles))
            group = LocalEnvironments(hosted, environment, tokenizer)
            self._environments[role.name] = group
            await group.start()
        else:
            executor = self._executor(role)
            calls = RoleCalls(role, self.plan, self)
            parts = []
            for backend in role.backends:
                used = self.plan.used_by(backend)
                handles = build_handles(role.name, used, self.plan.registry, calls.ask)
                load_tokenizer = partial(tokenizer_of, self.plan.registry, role)
                context = replace(self.plan.context(role), handles=handles, load_tokenizer=load_tokenizer)
                reward = self.plan.registry.load_factory(backend.record)(backend.options, context)
                name = part_name(role, backend.key)
                parts.append(RewardPart(name, reward, backend.weight, backend.data_sources, backend.unit, backend.gate))
                self._rewards[role.name] = CombinedReward(role.name, parts, role.timeout_s)
                await executor.run(f"setup of {backend.record.name}", reward.setup)

    def _executor(self, role: RolePlan) -> SerialExecutor:
        executor = SerialExecutor(role.name, role.timeout_s)
        self._executors.append(executor)
        return executor

    def _build(self, role: RolePlan) -> Callable[[int], Any]:
        """A function that builds replica ``index`` of the role."""
        factory = self.plan.registry.load_factory(role.backend.record)
        device = resolve_device(role.device, f"roles.{role.name}.device")

        def build(index: int) -> Any:
            return factory(role.backend.options, self.plan.context(role, replica=index, device=device))

        return build

    def trainer(self, role: str) -> LocalTrainer:
        """The trainer group of a role."""
        return self._trainers[role]

    def generator(self, role: str) -> LocalFleet:
        """The generator fleet of a role."""
        return self._fleets[role]

    def reward(self, role: str) -> CombinedReward:
        """The reward group of a role."""
        return self._rewards[role]

    def environment(self, role: str) -> LocalEnvironments:
        """The environments of a role."""
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
        transfer = self._transfers.get((trainer, follower))
        if transfer is None:
            return False
        require_taken(await transfer.sync([0], step), transfer.route)
        return True

    async def recover(self, lost: TrainerLostError) -> None:
        """Raises ``lost``: an error that kills a rank kills this whole process."""
        raise lost

    def devices(self) -> Mapping[str, frozenset[Device]]:
        """One device per role; ``cuda`` means the current one."""
        return {
            role.name: frozenset({_device(resolve_device(role.device, f"roles.{role.name}.device"))})
            for role in self.plan.roles.values()
            if role.holds_a_model
        }

    def describe(self) -> Mapping[str, Any]:
        """Backend, device and number of workers of every role."""
        return {
            role.name: {
                "kind": role.kind,
                "backend": " + ".join(backend.record.name for backend in role.backends),
                "device": "process"
                if not role.holds_a_model
                else resolve_device(role.device, f"roles.{role.name}.device"),
                "replicas": role.replicas,
            }
            for role in self.plan.roles.values()
        }

    async def close(self) -> None:
        """Close all roles; errors while closing are raised after everything was closed."""
        problems: list[str] = []
        closers: list[tuple[str, Callable[[], None]]] = [
            *(("weight sync", transfer.close) for transfer in self._transfers.values()),
            *(
                (f"executor of {executor.name}", lambda executor=executor: _stop(executor))
                for executor in self._executors
            ),
            *((name, fleet.close) for name, fleet in self._fleets.items()),
            *((name, local.trainer.close) for name, local in self._trainers.items()),
            *((name, group.close) for name, group in self._environments.items()),
            *((part.name, part.reward.close) for group in self._rewards.values() for part in group.parts),
        ]
        for name, close in closers:
            try:
                close()
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {error}")
        self._transfers, self._fleets, self._trainers, self._rewards = {}, {}, {}, {}
        self._executors, self._environments = [], {}
        if problems:
            raise ChatLearnError("closing failed for " + "; ".join(problems))


def _stop(executor: SerialExecutor) -> None:
    """Before its backend is closed: closing must not pull the model from under a call that still runs."""
    if not executor.stop(_STOP_S):
        raise BackendTimeoutError(f"a call still runs after {_STOP_S:g} s. It hangs here:\n{executor.stack()}")


def _device(name: str) -> Device:
    """The device with a resolved name."""
    return Device(f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name, name.startswith("cuda"))
