"""The replicas of a generator role, in any runtime: who serves a request, and what becomes of it if that one dies."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ChatLearnError, WeightSyncError, WorkerPlace
from chatlearn_core.protocols import MemoryAction, MemoryEvent, MemoryPart, OnTokens
from chatlearn_core.runtime.health import health_words
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState, SyncReceipt
from chatlearn_runtime_kit.pausable_timeouts import PausableTimeouts
from chatlearn_runtime_kit.replica_availability import ReplicaAvailability
from chatlearn_runtime_kit.restart_budget import RestartBudget, Tell

Resync = Callable[[int], Awaitable[None]]
T = TypeVar("T")


class FleetReplica(Protocol):
    """What a fleet needs of a replica to give it requests."""

    @property
    def state(self) -> ReplicaState: ...

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``; a replica that cannot answer any more has state ``dead`` when the call fails."""


R = TypeVar("R", bound=FleetReplica)


def replica_index(request: GenerateRequest, num_replicas: int) -> int:
    """The replica for a request that names none (those of the rollout manager do): by its group's id, the
    same one in every runtime and at any time, so that a group shares its prefix and a batch does not depend on timing.
    """
    return zlib.crc32((request.group_id or request.id).encode()) % num_replicas


async def every(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results of calls to several replicas, in order; what fails is raised when all have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and: {other}")
        raise errors[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _is_being_cancelled() -> bool:
    """Whether a ``CancelledError`` is for this task. One that an engine lets escape would end it without a word, and
    the call that waits for its sample would wait for ever.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class ReplicaFleet(ABC, Generic[R]):
    """All replicas of one generator role: a ``GeneratorFleet``, but for what a runtime does in its own way.

    A replica that died is rebuilt, gets the current weights, and its unfinished requests start again with the same
    random numbers; after ``max_restarts`` the error is raised. Requests go past a replica that loads weights or is
    rebuilt, as long as another one serves.

    Args:
        name: of the role.
        num_replicas: of it.
        timeout_s: longest time that one request may take, without the time for which the fleet is paused.
        max_restarts: how often a replica may be rebuilt in a run.
        tell: takes reports of that.
    """

    def __init__(
        self, name: str, num_replicas: int, timeout_s: float, max_restarts: int, tell: Tell | None = None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.replicas: list[R] = []
        self.resync: Resync | None = None
        """Brings the current weights to a rebuilt replica; set once weights were synced."""
        self._restart_budget = RestartBudget(
            name, max_restarts, setting="runtime.options.max_generator_restarts", event="replica_rebuilt", tell=tell
        )
        self._restart_locks = [asyncio.Lock() for _ in range(num_replicas)]
        self._availability = ReplicaAvailability(num_replicas)
        self._timeouts = PausableTimeouts()
        self._away: set[MemoryPart] = set()
        """Parts that are offloaded, also those of a replica that is yet to be rebuilt."""
        self._running = asyncio.Event()
        """Clear between ``pause`` and ``resume``."""
        self._running.set()

    # What a runtime does in its own way

    @abstractmethod
    async def start(self) -> None:
        """Make every replica, set up."""

    @abstractmethod
    async def _launch(self, index: int) -> R:
        """A new replica, set up, without the parts that are away: others may be using their memory."""

    @abstractmethod
    async def _discard(self, dead: R) -> None:
        """A dead replica is about to be replaced: end it, and fail the calls that still wait for its answers."""

    @abstractmethod
    async def _give_up(self, replica: R, reason: str) -> None:
        """Make a replica dead that holds other weights than it should."""

    @abstractmethod
    async def _lives(self, replica: R) -> bool:
        """Ask a replica how it is; one that does not live is dead when this returns."""

    @abstractmethod
    async def _health(self, replica: R) -> str | None:
        """What a replica says is wrong with it; None: nothing, or it cannot be asked."""

    @abstractmethod
    async def _timed_out(self, index: int, replica: R, request: GenerateRequest) -> BackendTimeoutError:
        """What to say of a request that had no completion; a replica that does not even say how it is, is dead then."""

    @abstractmethod
    async def _call(self, replica: R, method: Literal["abort", "pause", "resume"], *arguments: object) -> None:
        """Call a method of the generator, with a timeout.

        Raises:
            BackendError: it failed, or did not answer in time.
        """

    @abstractmethod
    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts of every replica that lives."""

    # GeneratorFleet

    @property
    def policy_version(self) -> int:
        """Oldest version among the replicas that serve."""
        return min((r.policy_version for r in self.replicas if r.state == "serving"), default=0)

    @property
    def num_restarts(self) -> int:
        """How often a replica was rebuilt."""
        return self._restart_budget.count

    @property
    def num_replicas(self) -> int:
        """As configured."""
        return len(self._restart_locks)

    @property
    def accepting(self) -> frozenset[int]:
        """See ``GeneratorFleet``."""
        return self._availability.accepting

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        """See ``GeneratorFleet``."""
        wanted = replica_index(request, self.num_replicas) if replica is None else replica
        while True:
            index = await self._place(request, wanted)
            serving, num_absences = self.replicas[index], self._availability.num_absences(index)
            cause: Exception
            try:
                async with self._timeouts.limit(self.timeout_s) as limit:
                    return await serving.generate(request, on_tokens)
            except ChatLearnError as error:
                if serving.state != "dead":
                    if isinstance(error, BackendTimeoutError) or num_absences == self._availability.num_absences(index):
                        raise
                    continue  # it began to load weights as the request came, and refused it: another one may take it
                cause = error
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                    raise
                if limit.expired():
                    cause = await self._timed_out(index, serving, request)
                else:
                    cause = await self._failed(index, serving, request, error)
                if serving.state != "dead":
                    raise cause from error
            await self._running.wait()  # while the fleet is paused the trainer's weights may be those of no version
            await self.restart(index, serving, cause)

    async def _place(self, request: GenerateRequest, wanted: int) -> int:
        """The replica that is wanted, or one that takes requests while that one does not; waits where none does."""
        while not (accepting := self._availability.accepting):
            waiting = self._availability.changed()
            if self._availability.is_rebuilding():  # which has timeouts of its own, and may need several of them
                await waiting
                continue
            try:
                async with self._timeouts.limit(self.timeout_s):
                    await waiting
            except TimeoutError:
                raise BackendTimeoutError(
                    f"role {self.name!r}: request {request.id!r} found no replica that serves within "
                    f"{self.timeout_s:g} s (roles.{self.name}.timeout_s): {self._availability}. Raise it, or let fewer "
                    "replicas change at a time (weight_sync.fleet_rule: rolling, weight_sync.max_loading)"
                ).at(WorkerPlace(self.name, method=f"generate({request.id})")) from None
        if wanted in accepting:
            return wanted
        return sorted(accepting)[replica_index(request, len(accepting))]

    async def _failed(self, index: int, replica: R, request: GenerateRequest, error: BaseException) -> BackendError:
        problem = await self._health(replica)
        return BackendError(
            f"role {self.name!r}, replica {index}: generate({request.id}) failed: {type(error).__name__}: {error}"
            + ("" if problem is None else f". {health_words(problem)}")
        ).at(WorkerPlace(self.name, f"replica {index}", f"generate({request.id})"))

    async def sync(
        self,
        policy_version: int,
        transfer: Callable[[], Awaitable[Sequence[SyncReceipt]]],
        transfer_to: Callable[[int], Awaitable[SyncReceipt]],
    ) -> list[SyncReceipt]:
        """Bring every replica to a version. One that fails is rebuilt and gets it once more, as does from now on every
        replica that is rebuilt.

        Args:
            policy_version: of the weights.
            transfer: brings them to all replicas; a receipt each.
            transfer_to: brings them to one that was rebuilt.

        Raises:
            WeightSyncError: the weights do not fit, or no replica may be rebuilt any more.
        """
        confirmed: dict[int, SyncReceipt] = {}

        async def resync(index: int) -> None:
            receipt = await transfer_to(index)
            if receipt.state != "serving":
                raise WeightSyncError(
                    f"rebuilt replica {index} of {self.name!r} did not take version {policy_version}: {receipt.error}"
                )
            confirmed[index] = receipt

        self.resync = resync
        await self.revive()
        for receipt in await transfer():
            confirmed[receipt.replica] = receipt
            if receipt.state == "dead":
                await self.restart(receipt.replica, self.replicas[receipt.replica], WeightSyncError(receipt.error))
        return [confirmed[index] for index in sorted(confirmed)]

    def loading(self, replicas: Collection[int]) -> AbstractContextManager[None]:
        """In the block these replicas change their weights: requests go past them."""
        return self._availability.absent(replicas, "loads weights")

    async def restart(self, index: int, dead: R, cause: Exception) -> None:
        """Replace a dead replica once, however many of its requests noticed."""
        async with self._restart_locks[index]:
            if self.replicas[index] is not dead:
                return
            with self._availability.absent(
                [index], "is rebuilt"
            ):  # it serves no request before it holds the current weights
                await self._restart_budget.rebuild(f"replica {index}", cause, partial(self._rebuild, index))

    async def rebuild_given_up(self) -> None:
        """Rebuild replicas that were given up, without weights: the next sync brings them. Nothing is counted: it was
        not they who failed.
        """
        self.resync = None
        for index, replica in enumerate(self.replicas):
            if replica.state == "dead":
                async with self._restart_locks[index]:
                    self._restart_budget.report(f"replica {index}", "was given up with the trainer and is rebuilt")
                    with self._availability.absent([index], "is rebuilt"):
                        await self._restart_budget.start(f"replica {index}", partial(self._rebuild, index))

    async def _rebuild(self, index: int) -> None:
        await self._discard(self.replicas[index])
        replica = self.replicas[index] = await self._launch(index)
        if self.resync is not None:
            try:
                await self.resync(index)
            except BaseException as error:  # it holds the weights of the model directory
                await self._give_up(replica, f"it did not get the current weights: {error}")
                raise

    async def revive(self) -> None:
        """Rebuild the replicas that are dead: while the fleet is paused their requests wait and do not ask for it."""
        await every(self._lives(replica) for replica in self._living())
        for index, replica in enumerate(self.replicas):
            if replica.state == "dead":
                problem = await self._health(replica)
                why = "" if problem is None else f": {problem}"
                cause = BackendError(f"replica {index} was found dead before a weight sync{why}")
                await self.restart(index, replica, cause)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """End these requests on every replica."""
        ids = None if request_ids is None else tuple(request_ids)
        await every(self._tell(replica, "abort", ids) for replica in self._living())

    async def pause(self) -> None:
        """See ``GeneratorFleet``."""
        self._running.clear()
        await every(self._tell(replica, "pause") for replica in self._living())
        self._timeouts.pause()

    async def resume(self) -> None:
        """See ``GeneratorFleet``."""
        await every(self._tell(replica, "resume") for replica in self._living())
        self._timeouts.resume()
        self._running.set()

    def _living(self) -> list[R]:
        return [replica for replica in self.replicas if replica.state != "dead"]

    async def _tell(self, replica: R, method: Literal["abort", "pause", "resume"], *arguments: object) -> None:
        """Call a replica; if it dies of it, those who wait for its answers hear of it."""
        try:
            await self._call(replica, method, *arguments)
        except ChatLearnError:
            if await self._lives(replica):
                raise

    async def offload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away |= set(parts)
        return await self._move("offload", parts)

    async def onload(self, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """See ``ModelGroup``."""
        self._away -= set(parts)
        return await self._move("onload", parts)
