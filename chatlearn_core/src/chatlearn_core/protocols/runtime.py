"""The runtime: builds roles and forwards calls to them, in one process or over a cluster.

The executor calls groups, never backend objects: a trainer group is all ranks of a trainer role, a generator fleet all
its replicas. Calls are coroutines; each has a timeout set in the configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from chatlearn_core.exceptions import TrainerLostError
from chatlearn_core.protocols.algorithm import Split
from chatlearn_core.protocols.data_store import DataStore
from chatlearn_core.protocols.environment import GenerateFor, RolloutOrder
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.protocols.lifecycle import MemoryPart
from chatlearn_core.protocols.loss import Loss
from chatlearn_core.protocols.memory import Device, MemoryEvent
from chatlearn_core.types import (
    Completion,
    Derived,
    FileFacts,
    GenerateRequest,
    Metrics,
    OutputRequest,
    Outputs,
    RewardResult,
    Rollout,
    Sample,
    SyncReceipt,
    TrainBatch,
)

RoleIsUp = Callable[[str], Awaitable[None]]
Derive = Callable[[TrainBatch], Derived]
AskGenerator = Callable[[str, GenerateRequest], Awaitable[Completion]]
"""``(role, request)`` -> the completion of a generator role; raises as ``GeneratorFleet.generate`` does."""
AtSync = Literal["none", "abort", "pause"]
LendWeights = Callable[[str], AbstractAsyncContextManager[None]]
"""``async with lend_weights(trainer)``: keeps the trainer's weights on its devices during the block."""


@dataclass(slots=True, frozen=True)
class RuntimeEvent:
    """An event in a runtime that did not stop it, such as a rebuilt worker."""

    name: str
    """One word for programs: ``replica_rebuilt``, ``reward_worker_rebuilt``, ``trainer_rebuilt``."""
    text: str
    """One sentence for users."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: role, number of the restart, restart limit, cause."""


class RoleGroup(Protocol):
    """All workers of one role."""

    @property
    def name(self) -> str:
        """The role's name in the configuration.

        Called: after ``start``; in the driver; any number of times.
        """


class ModelGroup(RoleGroup, Protocol):
    """All workers of a role that holds a model and therefore occupies devices."""

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts out of device memory on every worker.

        Called: before another role gets the devices that they share; in the driver; once or more per step of a run
        with shared devices.

        Returns:
            the memory in use afterwards, one event per worker and part. A dead generator replica moves nothing and is
            left out; once rebuilt, it holds only the parts that the others hold.
        """

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts back to the device on every worker; returns events as ``offload`` does.

        Called: before a call that needs the parts; in the driver; once or more per step of a run with shared devices.
        """


@runtime_checkable
class TrainerGroup(ModelGroup, Protocol):
    """All ranks of a trainer role: batches are split over data-parallel ranks, results are in batch order."""

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs in batch order; per-token outputs may be ``TensorRef``.

        Called: for each call that a flow makes on the role; in the driver; once per call and step, more in
        evaluations.
        """

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics:
        """See ``Trainer.update``; the ranks' metrics are merged.

        Called: for each mini-batch; in the driver; ``epochs * mini_batches`` times per step.
        """

    async def derive(self, batch: TrainBatch, function: Derive, split: Split = "group") -> Derived:
        """Compute new data for a batch in a worker, which has its arrays or fetches them.

        Called: for advantages, measurements and evaluations; in the driver; once or more per step.

        Args:
            batch: may contain references.
            function: pickled by name: a module-level function or a method of a plugin's object; called once for each
                part of the batch.
            split: ``group`` splits the batch into whole groups over the data-parallel ranks; otherwise the whole batch
                is one part.

        Returns:
            the parts' data in batch order (per-token data may be ``TensorRef``), all their exclusions, and their merged
            metrics.
        """

    async def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint; returns the facts of the files written by all ranks.

        Called: for each checkpoint; in the driver; once per checkpoint.
        """

    async def load(self, directory: Path) -> None:
        """See ``Trainer.load``.

        Called: when a run resumes or returns to its last checkpoint; in the driver; once each time.
        """

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        """See ``Trainer.load_model``; the optimizer state is reset.

        Called: when the role is refreshed from a model directory; in the driver; once each time.
        """

    async def export_model(self, directory: Path) -> None:
        """See ``Trainer.export_model``.

        Called: when training ends, and for a refresh by a model directory; in the driver; once each time.
        """


@runtime_checkable
class BackgroundSavingGroup(Protocol):
    """A trainer role whose checkpoint may be written while it works on; see ``BackgroundSavingTrainer``."""

    async def begin_save(self, directory: Path) -> bool:
        """Copy the state and begin to write it; False: this trainer cannot, and nothing has begun.

        Called: for each checkpoint, with ``checkpoint.background``; in the driver; once per checkpoint.
        """

    async def finish_save(self) -> Mapping[str, FileFacts]:
        """Wait until the files are written; returns their facts.

        Called: after ``begin_save``; in the driver; once per checkpoint.
        """


@runtime_checkable
class GeneratorFleet(ModelGroup, Protocol):
    """All replicas of a generator role."""

    @property
    def policy_version(self) -> int:
        """Oldest version among the serving replicas.

        Called: for metrics and admission; in the driver; any number of times.
        """

    at_sync: AtSync
    """What becomes of the open requests of a replica before it loads weights in a sync: ``abort`` ends them with the
    tokens so far, ``pause`` pauses the replica until it has loaded. By default ``none``: nothing."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas, dead ones included.

        Called: when requests are routed; in the driver; any number of times.
        """

    @property
    def accepting(self) -> frozenset[int]:
        """Replicas that accept requests: those that are neither loading weights nor being rebuilt. Returns the same
        object until the set changes.

        Called: when requests are routed; in the driver; any number of times.
        """

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Sample one completion. Arrays and text of the completion may be references.

        The request goes to ``replica``, or by default to a replica chosen from its group id alone. If that replica does
        not accept requests, it goes to another that does; if none does, it waits until one does.

        Called: for each completion; in the driver; once per sample or turn, and again for each resumption and retry.

        Args:
            request: the request.
            replica: index of the replica to use.
            on_tokens: called on this event loop with tokens as they are sampled, or somewhat later, if the generator
                streams (``GeneratorSpec.streaming``). If the request restarts on another replica, calls begin again
                with its first token.

        Raises:
            ReplicaLostError: a replica died and has no restarts left.
            BackendTimeoutError: no completion within the role's timeout.
            BackendError: the request failed although its replica is alive.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See ``Generator.abort``; reaches every replica.

        Called: when a step has enough samples, a limit is over or the run ends; in the driver; any number of times.
        """

    async def pause(self) -> None:
        """Stop sampling on every replica; requests of a replica that dies meanwhile also wait for ``resume``.

        Called: before weights change or memory is offloaded; in the driver; once or more per step.
        """

    async def resume(self) -> None:
        """Go on after ``pause``.

        Called: after ``pause``; in the driver; as often as ``pause``.
        """

    async def hold_rebuilds(self) -> None:
        """Updates begin to change the trainer's weights: until ``release_rebuilds`` or the next sync, a rebuilt replica
        gets them under no version. Requests that find no other replica wait meanwhile.

        Called: before a step's updates; in the driver; once per step that trains.
        """

    async def release_rebuilds(self, policy_version: int) -> None:
        """The updates ended: the trainer's weights are those of this version, which the next sync brings.

        Called: after a step's updates, before their sync; in the driver; once per step that trains.
        """


@runtime_checkable
class RewardGroup(RoleGroup, Protocol):
    """All workers of a reward role; the group already combines and routes rewards."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """See ``Reward.score``; the results of several rewards are combined.

        Called: when samples or groups are finished; in the driver; once per batch of samples.
        """


@runtime_checkable
class EnvironmentGroup(RoleGroup, Protocol):
    """All workers of an environment role."""

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        """Make one rollout.

        Called: for each rollout; in the driver; once per rollout.

        Args:
            order: the rollout to make.
            generate: answers the environment's requests by the handles of the role's ``uses``.

        Raises:
            BackendTimeoutError: the rollout did not finish within ``order.timeout_s``; names rollout and role.
            RoleLostError: a generator died more often than its restart limit allows.
            BackendError: the environment raised, or its result breaks a rule; names the rollout and the rule.
        """


@runtime_checkable
class Runtime(Protocol):
    """Owns every role of a run from ``start`` to ``close``."""

    on_event: Callable[[RuntimeEvent], None] | None
    """Set by the executor before ``start``; called on its event loop."""

    @property
    def data(self) -> DataStore:
        """The store that fetches the values behind references in completions, outputs and derived data.

        Called: when values behind references are needed; in the driver; any number of times.
        """

    lend_weights: LendWeights
    """Set by the executor before ``start``; entered around every weight transfer outside ``sync_weights``, such as to a
    replica that is rebuilt while others sample. By default weights are never offloaded."""

    ask_generator: AskGenerator
    """Set by the executor before ``start``; answers the requests that roles make to generators through their handles
    (``uses``), so that ``rollout.max_concurrent``, retries and time limits hold for them, too. By default the fleet of
    the role answers."""

    async def start(self, role_is_up: RoleIsUp | None = None) -> None:
        """Build and set up all roles.

        Called: before any other work; in the driver; once.

        Args:
            role_is_up: awaited with the name of each trainer and generator role once it is set up. If given, roles that
                share a device start one after the other, so that one can be offloaded before the next starts.

        Raises:
            ChatLearnError: a role failed to start; the others are closed.
        """

    def trainer(self, role: str) -> TrainerGroup:
        """The group of a trainer role.

        Called: after ``start``; in the driver; any number of times.
        """

    def generator(self, role: str) -> GeneratorFleet:
        """The fleet of a generator role.

        Called: after ``start``; in the driver; any number of times.
        """

    def reward(self, role: str) -> RewardGroup:
        """The group of a reward role.

        Called: after ``start``; in the driver; any number of times.
        """

    def environment(self, role: str) -> EnvironmentGroup:
        """Raises ConfigError if the runtime cannot host environments.

        Called: after ``start``; in the driver; any number of times.
        """

    async def sync_weights(self, trainer: str, generator: str, policy_version: int) -> list[SyncReceipt]:
        """Load the trainer's weights into every replica as ``policy_version``.

        Called: at the start, after each step that trained and after a return to a checkpoint; in the driver; once per
        route each time.

        Raises:
            WeightSyncError: no replica serves the new version.
        """

    async def recover(self, lost: TrainerLostError) -> None:
        """Rebuild the trainer roles that lost a rank, as ``start`` built them; the caller then loads their state.

        Called: when a trainer lost a rank; in the driver; once per loss.

        Raises:
            TrainerLostError: ``lost`` itself, if no restart is allowed or none is left.
        """

    def devices(self) -> Mapping[str, frozenset[Device]]:
        """Devices of each trainer and generator role: planned before ``start``, actual afterwards.

        Called: before and after ``start``; in the driver; any number of times.
        """

    def describe(self) -> Mapping[str, Any]:
        """The placement of workers, for the log and ``--dry-run``: planned before ``start``, actual afterwards. Maps
        each role to a mapping, in which ``places`` has one line per worker if workers are separate processes.

        Called: before and after ``start``, and for ``--dry-run``; in the driver; any number of times.
        """

    async def close(self) -> None:
        """Close all roles. Safe to call twice.

        Called: last, also after a failed ``start``; in the driver; once or twice.
        """


@runtime_checkable
class RefreshingRuntime(Runtime, Protocol):
    """A runtime that connects trainers with trainers: those whose ``RolePlan.refresh`` has a route."""

    async def refresh_weights(self, trainer: str, follower: str, step: int) -> bool:
        """Bring a trainer's weights to the trainer role that follows it, over their route.

        Called: after the steps that ``roles.<role>.refresh`` names; in the driver; once per follower each time.

        Args:
            trainer: the role that sends.
            follower: the role that takes them, with the decay of its plan.
            step: after which this happens, for messages.

        Returns:
            False: the follower's model cannot take tensors one at a time (``WeightTakingTrainer.weight_loader``), and
            nothing was moved.

        Raises:
            WeightSyncError: a rank of the follower did not take all of them; names it.
            TrainerLostError: a rank of either role is gone.
        """
