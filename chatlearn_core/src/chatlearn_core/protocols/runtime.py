"""The runtime: builds roles and carries calls to them, in one process or over a cluster.

The executor speaks to groups, never to backend objects: a trainer group is all ranks of a trainer role, a generator
fleet all its replicas. Calls are coroutines; every one has a timeout that the configuration sets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
LendWeights = Callable[[str], AbstractAsyncContextManager[None]]
"""``async with lend_weights(trainer)``: the trainer's weights are on its devices in the block."""


@dataclass(slots=True, frozen=True)
class RuntimeEvent:
    """Something that happened to a runtime and did not stop it, such as a worker that was rebuilt."""

    name: str
    """One word for programs: ``replica_rebuilt``, ``reward_worker_rebuilt``, ``ranks_rebuilt``."""
    text: str
    """A sentence for people."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: role, number of the restart, the limit, the cause."""


class RoleGroup(Protocol):
    """All workers of one role."""

    @property
    def name(self) -> str: ...


class ModelGroup(RoleGroup, Protocol):
    """All workers of a role that holds a model, and so occupies devices."""

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Move parts out of device memory on every worker.

        Returns:
            what is live afterwards, a worker and part each. A generator replica that is dead moves nothing and is left
            out; when it is rebuilt it holds only what the others hold.
        """

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Bring parts back on every worker; what is returned is as for ``offload``."""


@runtime_checkable
class TrainerGroup(ModelGroup, Protocol):
    """All ranks of a trainer role: batches are split over data-parallel ranks, results come back in batch order."""

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Outputs:
        """Outputs in batch order; what is per token may be ``TensorRef``."""

    async def update(self, batch: TrainBatch, loss: Loss) -> Metrics: ...

    async def derive(self, batch: TrainBatch, function: Derive, split: Split = "group") -> Derived:
        """Compute new data of a batch in a worker, where its arrays are or are fetched to.

        Args:
            batch: any, also with references.
            function: pickled by name, as a module's function or a method of a plugin's object; called once for each
                part of the batch.
            split: whether parts are whole groups, divided over the data-parallel ranks, or the whole batch is one.

        Returns:
            the parts' data in the order of the batch (per token, it may be ``TensorRef``), their exclusions together,
            their metrics merged.
        """

    async def save(self, directory: Path) -> Mapping[str, FileFacts]:
        """Write a resumable checkpoint; what all ranks say of the files that they wrote."""

    async def load(self, directory: Path) -> None: ...

    async def load_model(self, directory: Path, *, decay: float = 0.0) -> None:
        """See ``Trainer.load_model``; the optimizer starts anew."""

    async def export_model(self, directory: Path) -> None: ...


@runtime_checkable
class GeneratorFleet(ModelGroup, Protocol):
    """All replicas of a generator role."""

    @property
    def policy_version(self) -> int:
        """Oldest version among the replicas that serve."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def accepting(self) -> frozenset[int]:
        """Replicas that take requests: those that neither load weights nor are rebuilt just now. The same object until
        that changes.
        """

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Sample one completion, on the replica that is named; without one, on a replica that the request's group
        alone decides. Where that one does not take requests, on another that does; where none does, when one does.
        Arrays and text of the completion may be references.

        Args:
            request: what to sample.
            replica: that is to sample it.
            on_tokens: called on this event loop with tokens as they come, or some time later, if the generator streams
                (``GeneratorSpec.streaming``). A request that starts again on another replica begins again with its
                first token.

        Raises:
            ReplicaLostError: a replica died, and may not be rebuilt any more.
            BackendTimeoutError: no completion within the role's timeout.
            BackendError: the request failed on a replica that lives.
        """

    async def abort(self, request_ids: Collection[str] | None = None) -> None: ...

    async def pause(self) -> None:
        """Stop sampling on every replica; also what a replica had that dies meanwhile waits for ``resume``."""

    async def resume(self) -> None:
        """Go on after ``pause``."""


@runtime_checkable
class RewardGroup(RoleGroup, Protocol):
    """All workers of a reward role; combining and routing have already happened behind it."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]: ...


@runtime_checkable
class EnvironmentGroup(RoleGroup, Protocol):
    """All workers of an environment role."""

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        """Make one rollout.

        Args:
            order: what is wanted.
            generate: answers the environment's requests, by the handles of the role's ``uses``.

        Raises:
            BackendTimeoutError: not finished within ``order.timeout_s``; names rollout and role.
            RoleLostError: a generator died too often.
            BackendError: the environment raised, or what it returned breaks a rule; names rollout and rule.
        """


@runtime_checkable
class Runtime(Protocol):
    """Owns every role of a run from ``start`` to ``close``."""

    on_event: Callable[[RuntimeEvent], None] | None
    """Set by the executor before ``start``; called on its event loop."""

    @property
    def data(self) -> DataStore:
        """Brings the values of what completions, outputs and derived data refer to."""

    lend_weights: LendWeights
    """Set by the executor before ``start``; entered around every transfer of weights that ``sync_weights`` did not ask
    for, such as to a replica that is rebuilt while others sample. By default weights are never offloaded."""

    async def start(self, role_is_up: RoleIsUp | None = None) -> None:
        """Build and set up all roles.

        Args:
            role_is_up: awaited with the name of each trainer and generator role that is set up. Given one, roles that
                share a device are started one after the other, so that a role may be offloaded before the next starts.

        Raises:
            ChatLearnError: a role does not start; the others are closed.
        """

    def trainer(self, role: str) -> TrainerGroup: ...

    def generator(self, role: str) -> GeneratorFleet: ...

    def reward(self, role: str) -> RewardGroup: ...

    def environment(self, role: str) -> EnvironmentGroup:
        """Raises ConfigError where the runtime hosts no environments."""

    async def sync_weights(self, trainer: str, generator: str, policy_version: int) -> list[SyncReceipt]:
        """Move the trainer's weights into every replica, under ``policy_version``.

        Raises:
            WeightSyncError: no replica serves the new version.
        """

    async def recover(self, lost: TrainerLostError) -> None:
        """Rebuild the trainer roles that lost a rank, as ``start`` made them; their state is then to be loaded.

        Raises:
            TrainerLostError: ``lost``, where nothing may be rebuilt (any more).
        """

    def devices(self) -> Mapping[str, frozenset[Device]]:
        """Where the memory of each trainer and generator role lies: before ``start`` as planned, then as it is."""

    def describe(self) -> Mapping[str, Any]:
        """Who sits where, for the log and ``--dry-run``, before ``start`` as planned: by role a mapping, in which
        ``places`` has one line a worker where the workers are processes of their own.
        """

    async def close(self) -> None:
        """Close all roles. Twice is fine."""
