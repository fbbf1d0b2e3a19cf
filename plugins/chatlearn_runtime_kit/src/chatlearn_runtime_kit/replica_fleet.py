"""The replicas of a generator role in any runtime: assigns requests, and repeats them if a replica dies."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Generic, Literal, Protocol, TypeVar

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ChatLearnError,
    TrainerLostError,
    WeightSyncError,
    WorkerPlace,
)
from chatlearn_core.protocols import AtSync, MemoryAction, MemoryEvent, MemoryPart, OnTokens
from chatlearn_core.runtime.health import health_words
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState, SyncReceipt
from chatlearn_runtime_kit.pausable_timeouts import PausableTimeouts
from chatlearn_runtime_kit.replica_availability import ReplicaAvailability
from chatlearn_runtime_kit.restart_budget import RestartBudget, Tell

Resync = Callable[[int], Awaitable[None]]
_RETRY_S = 1.0
"""After this time without an answer, requests are aborted once more: some may have started only then."""
_WAITS: Final = "waits for the next version"
T = TypeVar("T")


class FleetReplica(Protocol):
    """The interface of a replica that a fleet requires."""

    @property
    def state(self) -> ReplicaState: ...

    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``; a replica that can no longer answer has state ``dead`` when the call fails."""


R = TypeVar("R", bound=FleetReplica)


def replica_index(request: GenerateRequest, num_replicas: int) -> int:
    """The replica for a request that names none (the rollout manager names one). It depends only on the group id, the
    same in every runtime and at any time, so that a group shares its prefix and batches do not depend on timing.
    """
    return zlib.crc32((request.group_id or request.id).encode()) % num_replicas


async def every(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Results of calls to several replicas, in order; an error is raised once all calls have ended."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"and: {other}")
        raise errors[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _is_being_cancelled() -> bool:
    """Whether a ``CancelledError`` is meant for this task. A ``CancelledError`` that escapes from an engine would end
    the task silently, and the call waiting for its sample would wait for ever.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class ReplicaFleet(ABC, Generic[R]):
    """All replicas of one generator role: the part of a ``GeneratorFleet`` that does not depend on the runtime.

    A replica that dies is rebuilt, gets the current weights, and its unfinished requests start again with the same
    random numbers; after ``max_restarts`` the error is raised. Requests bypass a replica that loads weights or is being
    rebuilt, as long as another one serves.

    Between ``hold_rebuilds`` and ``release_rebuilds`` the trainer's weights belong to no version. A replica rebuilt
    then loads the version that the transport keeps; where it keeps none, it serves again once it has the next version.

    Args:
        name: name of the role.
        num_replicas: number of replicas.
        timeout_s: maximum time of one request, seconds, not counting time in which the fleet is paused.
        max_restarts: how often each replica may be rebuilt in a run.
        tell: receives reports of restarts.
    """

    def __init__(
        self, name: str, num_replicas: int, timeout_s: float, max_restarts: int, tell: Tell | None = None
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.replicas: list[R] = []
        self.resync: Resync | None = None
        """Transfers the current weights to a rebuilt replica; set after the first weight sync."""
        self._version = 0
        """The version that a rebuilt replica gets."""
        self._is_kept: Callable[[], bool] = lambda: False
        """Whether a rebuilt replica gets it without the trainer."""
        self._trainer: Literal["unchanged", "changing", "ahead"] = "unchanged"
        """Whether the trainer has the weights that replicas serve, is between two updates, or has the next version."""
        self._unsynced: set[int] = set()
        """Rebuilt replicas without the weights of a version."""
        self._num_loading = 0
        """Number of rebuilt replicas that are loading weights."""
        self._none_loads = asyncio.Event()
        self._none_loads.set()
        self.at_sync: AtSync = "none"
        self._open: list[set[asyncio.Future[None]]] = [set() for _ in range(num_replicas)]
        """Per replica: one future for each open request, done when it has ended."""
        self._taking: dict[int, R] = {}
        """The replicas that took, or failed to take, the weights of the current sync."""
        self._restart_budget = RestartBudget(
            name, max_restarts, setting="runtime.options.max_generator_restarts", event="replica_rebuilt", tell=tell
        )
        self._restart_locks = [asyncio.Lock() for _ in range(num_replicas)]
        self._availability = ReplicaAvailability(num_replicas)
        self._timeouts = PausableTimeouts()
        self._away: set[MemoryPart] = set()
        """Offloaded parts, which a rebuilt replica must not load either."""
        self._running = asyncio.Event()
        """Cleared between ``pause`` and ``resume``."""
        self._running.set()

    # Implemented by each runtime

    @abstractmethod
    async def start(self) -> None:
        """Build and set up every replica."""

    @abstractmethod
    async def _launch(self, index: int) -> R:
        """Build and set up a replica without its offloaded parts, whose memory other roles may be using."""

    @abstractmethod
    async def _discard(self, dead: R) -> None:
        """End a dead replica before it is replaced, and fail the calls that still wait for it."""

    @abstractmethod
    async def _give_up(self, replica: R, reason: str) -> None:
        """Mark a replica as dead because it holds the wrong weights."""

    @abstractmethod
    async def _lives(self, replica: R) -> bool:
        """Check a replica; if it is not alive, it is marked dead when this returns."""

    @abstractmethod
    async def _health(self, replica: R) -> str | None:
        """The replica's own problem; None if it reports none or cannot be asked."""

    @abstractmethod
    async def _timed_out(self, index: int, replica: R, request: GenerateRequest) -> BackendTimeoutError:
        """The error for a request without a completion; a replica that cannot even report its health is dead."""

    @abstractmethod
    async def _call(self, replica: R, method: Literal["abort", "pause", "resume"], *arguments: object) -> None:
        """Call a method of the generator, with a timeout.

        Raises:
            BackendError: it failed, or did not answer in time.
        """

    @abstractmethod
    async def _move(self, action: MemoryAction, parts: Collection[MemoryPart]) -> list[MemoryEvent]:
        """Offload or onload parts of every living replica."""

    # GeneratorFleet

    @property
    def policy_version(self) -> int:
        """Oldest version among the serving replicas."""
        return min((r.policy_version for r in self.replicas if r.state == "serving"), default=0)

    @property
    def num_restarts(self) -> int:
        """Number of times replicas were rebuilt."""
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
                with self._counted(index):
                    async with self._timeouts.limit(self.timeout_s) as limit:
                        return await serving.generate(request, on_tokens)
            except ChatLearnError as error:
                if serving.state != "dead":
                    if isinstance(error, BackendTimeoutError) or num_absences == self._availability.num_absences(index):
                        raise
                    continue  # it began to load weights and refused the request, which another replica may take
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
            await self._running.wait()  # while paused, the trainer's weights may match no version
            await self.restart(index, serving, cause)

    @contextmanager
    def _counted(self, index: int) -> Iterator[None]:
        ended = asyncio.get_running_loop().create_future()
        self._open[index].add(ended)
        try:
            yield
        finally:
            self._open[index].remove(ended)
            ended.set_result(None)

    async def _place(self, request: GenerateRequest, wanted: int) -> int:
        """The wanted replica, or one that accepts requests while it does not; waits if none does."""
        while not (accepting := self._availability.accepting):
            waiting = self._availability.changed()
            if self._availability.is_rebuilding():  # rebuilding has its own timeouts and may need several
                await waiting
                continue
            try:
                async with self._timeouts.limit(self.timeout_s):
                    await waiting
            except TimeoutError:
                remedy = (
                    "let fewer replicas change at a time (weight_sync.fleet_rule: rolling, weight_sync.max_loading)"
                )
                if self._unsynced:
                    remedy = "choose a weight sync that keeps each version (weight_sync.backend: checkpoint)"
                raise BackendTimeoutError(
                    f"role {self.name!r}: request {request.id!r} found no replica that serves within "
                    f"{self.timeout_s:g} s (roles.{self.name}.timeout_s): {self._availability}. Raise it, or {remedy}"
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
        transfer_to: Callable[[int, int], Awaitable[SyncReceipt]],
        keeps: Callable[[int], bool] = lambda version: False,
    ) -> list[SyncReceipt]:
        """Transfer a version to every replica. A replica that fails is rebuilt and gets the version again, as does
        every replica rebuilt later. Ends ``hold_rebuilds``.

        Args:
            policy_version: version of the weights.
            transfer: transfers them to all replicas; returns one receipt per replica.
            transfer_to: ``(replica, version)``: transfers the current weights to one rebuilt replica.
            keeps: whether ``transfer_to`` gets this version without the trainer.

        Raises:
            WeightSyncError: the weights do not fit, or no replica has restarts left.
        """
        confirmed: dict[int, SyncReceipt] = {}

        async def resync(index: int) -> None:
            version = self._version
            receipt = await transfer_to(index, version)
            if receipt.state != "serving":
                raise WeightSyncError(
                    f"rebuilt replica {index} of {self.name!r} did not take version {version}: {receipt.error}"
                )
            confirmed[index] = receipt

        self.resync, self._version, self._trainer = resync, policy_version, "unchanged"
        self._is_kept = lambda: keeps(self._version)
        self._taking = {}
        await self.revive()
        for receipt in await transfer():
            index = receipt.replica
            self._have_weights([index])
            if receipt.state != "dead":
                confirmed[index] = receipt
                continue
            await self.restart(index, self._taking.get(index, self.replicas[index]), WeightSyncError(receipt.error))
            confirmed.setdefault(index, receipt)
        return [confirmed[index] for index in sorted(confirmed)]

    async def hold_rebuilds(self) -> None:
        """See ``GeneratorFleet``. Waits for rebuilt replicas that are loading weights."""
        self._trainer = "changing"
        await self._none_loads.wait()

    async def release_rebuilds(self, policy_version: int) -> None:
        """See ``GeneratorFleet``. Rebuilt replicas get these weights only if no other serves; otherwise with the next
        sync.
        """
        self._trainer = "ahead"
        if not self._is_kept():
            self._version = policy_version
        if not self.accepting:
            await every(self._catch_up(index) for index in sorted(self._unsynced))

    async def _catch_up(self, index: int) -> None:
        """Bring the current weights to a rebuilt replica that has none."""
        async with self._restart_locks[index]:
            if index not in self._unsynced:
                return
            replica = self.replicas[index]
            try:
                await self._load_weights(index, replica)
                return
            except TrainerLostError:
                raise
            except BackendError as error:
                failure = error
        await self.restart(index, replica, failure)

    @contextmanager
    def loading(self, replicas: Collection[int]) -> Iterator[None]:
        """During the block these replicas load weights, and requests bypass them."""
        with self._availability.absent(replicas, "loads weights"):
            yield
            self._have_weights(replicas)

    @asynccontextmanager
    async def interrupted(self, replicas: Collection[int]) -> AsyncIterator[None]:
        """During the block these replicas take the weights of a sync; before it, ``at_sync`` acts on their requests. To
        be entered in ``loading``, so that requests that are made again go to other replicas.
        """
        if self.at_sync == "abort":
            await every(self._end_requests(index) for index in replicas)
        taking = {index: self.replicas[index] for index in replicas}
        self._taking |= taking
        if self.at_sync != "pause":
            yield
            return
        await every(self._tell(replica, "pause") for replica in taking.values() if replica.state != "dead")
        try:
            yield
        finally:
            await every(self._tell(replica, "resume") for replica in taking.values() if replica.state != "dead")

    async def _end_requests(self, index: int) -> None:
        """Abort the requests of a replica, and wait until all have ended."""
        while self._open[index]:
            if self.replicas[index].state != "dead":
                await self._tell(self.replicas[index], "abort", None)
            if left := list(self._open[index]):
                await asyncio.wait(left, timeout=_RETRY_S)

    def _have_weights(self, replicas: Collection[int]) -> None:
        if back := self._unsynced.intersection(replicas):
            self._unsynced -= back
            self._availability.come_back(back, _WAITS)

    async def restart(self, index: int, dead: R, cause: Exception) -> None:
        """Replace a dead replica once, even if several of its requests report it."""
        async with self._restart_locks[index]:
            if self.replicas[index] is not dead:
                return
            with self._availability.absent(
                [index], "is rebuilt"
            ):  # it must not serve requests before it has the current weights
                await self._restart_budget.rebuild(f"replica {index}", cause, partial(self._rebuild, index))

    async def rebuild_given_up(self) -> None:
        """Rebuild replicas that were given up, without weights, which the next sync brings. This counts as no restart,
        because the replicas did not fail.
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
        if self.resync is None:
            return
        waits = self._trainer == "changing" or (self._trainer == "ahead" and self.accepting)
        if not waits or self._is_kept():
            await self._load_weights(index, replica)
        elif index not in self._unsynced:
            self._unsynced.add(index)
            self._availability.leave([index], _WAITS)

    async def _load_weights(self, index: int, replica: R) -> None:
        assert self.resync is not None, "there are weights to load"
        self._num_loading += 1
        self._none_loads.clear()
        try:
            await self.resync(index)
        except BaseException as error:  # it still has the weights of the model directory
            await self._give_up(replica, f"it did not get the current weights: {error}")
            raise
        finally:
            self._num_loading -= 1
            if not self._num_loading:
                self._none_loads.set()
        self._have_weights([index])

    async def revive(self) -> None:
        """Rebuild dead replicas. While the fleet is paused, waiting requests do not trigger this themselves."""
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
        """Call a replica; if it dies, fail the calls that wait for its answers."""
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
