"""The rollout manager: distributes requests over the replicas of a generator role and decides when each starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, RoleLostError
from chatlearn_core.executor.rollouts.occupancy import Occupancy
from chatlearn_core.executor.rollouts.routing import Routing, affinity_of, longest_first
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.protocols import GeneratorFleet, OnTokens, Runtime
from chatlearn_core.runtime.boundary import Origin, check_completion
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import Completion, GenerateRequest, Metrics, merge_metrics

_ABORT_S = 10.0
"""Timeout for an abort, seconds. A replica that exceeds it hangs, which its next call will show."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request and its turn, which is granted when a replica may start it."""

    request: GenerateRequest
    turn: asyncio.Future[None]
    on_tokens: OnTokens | None
    replica: int = -1


class RolloutManager:
    """Requests to the replicas of one generator role.

    Requests made in one turn of the event loop form a wave. A wave is spread over the replicas as a whole, each group
    on one replica, and its requests start in order of their work, longest first. With ``max_concurrent``, a replica has
    at most that many open requests and starts the next as soon as one ends. Requests waiting for a replica that accepts
    none, because it loads weights or is being rebuilt, move to other replicas. A request that fails on a living replica
    is repeated ``max_retries`` times in its place with the same random numbers; one that exceeds
    ``request_timeout_s`` is aborted in the engine and fails. The fleet handles the requests of a dead replica.

    Args:
        fleet: returns the fleet; called for every request, because a runtime may replace the fleet.
        config: section ``rollout``.
        clock: returns seconds, for the idle fraction of replicas.
        origin: plugin and role of the completions, used in checking them.
        streams: whether the generator streams tokens (``GeneratorSpec.streaming``).
        count_tokens: called with the number of newly sampled tokens, if the generator streams; None: tokens are not
            counted.
        on_open: called with a replica and its number of open requests, whenever that changes.
    """

    def __init__(
        self,
        fleet: Callable[[], GeneratorFleet],
        config: RolloutConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        origin: Origin | None = None,
        streams: bool = False,
        count_tokens: Callable[[int], None] | None = None,
        on_open: Callable[[int, int], None] = lambda replica, num_open: None,
    ) -> None:
        self.config = config
        self._on_open = on_open
        self._streams = streams
        self._count_tokens = count_tokens
        self._origin = origin or Origin("generator", "a generator")
        self._fleet = fleet
        self._clock = clock
        self._arrived: list[_Entry] = []
        self._queues: list[list[_Entry]] = []
        """Per replica: waiting requests, next to start first."""
        self._num_open: list[int] = []
        """Per replica: number of started requests that have not ended."""
        self._routing = Routing(0)
        self._accepting: frozenset[int] = frozenset()
        """Replicas that accepted requests when this was last checked."""
        self._occupancy = Occupancy(0, clock)
        self.num_retries = 0
        """Number of retries since ``begin``."""

    def begin(self) -> None:
        """Start a new batch of work, which ``metrics`` then covers. Known prefixes are forgotten, so that a batch does
        not depend on earlier batches.
        """
        replicas = self._fleet().num_replicas
        if replicas != self._routing.num_replicas:
            assert not any(self._num_open), "the number of replicas changed while requests were open"
            self._routing = Routing(replicas)
            self._queues, self._num_open = [[] for _ in range(replicas)], [0] * replicas
            self._accepting = frozenset(range(replicas))
        self._routing.forget()
        self._occupancy = Occupancy(replicas, self._clock, self._num_open)
        self.num_retries = 0

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one completion.

        Args:
            on_tokens: called with tokens as they are sampled, if the generator streams. Calls begin again with the
                first token if the request is repeated.

        Raises:
            ReplicaLostError: a replica died and has no restarts left.
            BackendTimeoutError: no completion within ``rollout.request_timeout_s`` of its start, or the role's timeout.
            ContractError: the completion breaks a rule and must not be trained on.
            BackendError: the request and all its retries failed.
        """
        if not self._queues:
            self.begin()
        entry = _Entry(request, asyncio.get_running_loop().create_future(), on_tokens)
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._place_wave)
        self._arrived.append(entry)
        try:
            await entry.turn
        except asyncio.CancelledError:
            self._withdraw(entry)
            raise
        try:
            return await self._attempts(entry)
        finally:
            self._release(entry)

    def metrics(self) -> Metrics:
        """Metrics since ``begin``: idle fractions of replicas, and retries."""
        return self._occupancy.metrics(self.num_retries)

    # Placing

    def _place_wave(self) -> None:
        wave, self._arrived = self._arrived, []
        wave = [entry for entry in wave if not entry.turn.done()]
        try:
            self._follow_fleet()
            self._queue_up(wave)
        except Exception as error:  # this callback is not awaited: pass the error to the waiting requests
            for entry in wave:
                if not entry.turn.done():
                    entry.turn.set_exception(error)

    def _queue_up(self, wave: Sequence[_Entry]) -> None:
        requests = [entry.request for entry in wave]
        some = len(self._accepting) < len(self._queues)
        for entry, replica in zip(wave, self._routing.assign(requests, self._accepting if some else ()), strict=True):
            entry.replica = replica
        for index in longest_first(requests):
            self._queues[wave[index].replica].append(wave[index])
        for replica in range(len(self._queues)):
            self._start(replica)

    def _follow_fleet(self) -> None:
        """Move requests waiting for replicas that no longer accept any to replicas that do; a replica that accepts
        requests again takes its share from the others. If no replica accepts requests, nothing moves.
        """
        accepting = self._fleet().accepting
        if accepting is self._accepting or not accepting:
            return
        returned, self._accepting = accepting - self._accepting, accepting
        passed: list[_Entry] = []
        for replica, queue in enumerate(self._queues):
            if queue and replica not in accepting:
                passed += [entry for entry in queue if not entry.turn.done()]
                for entry in queue:
                    self._routing.done(entry.request, replica)
                queue.clear()
        if passed:
            self._queue_up(passed)
        for replica in sorted(returned):
            while not self._queues[replica] and self._has_place(replica) and self._steal(replica):
                self._start(replica)

    def _start(self, replica: int) -> None:
        """Start requests while the replica has room."""
        queue = self._queues[replica]
        while queue and self._has_place(replica):
            entry = queue.pop(0)
            if entry.turn.done():  # cancelled, and about to withdraw
                self._routing.done(entry.request, replica)
                continue
            self._occupancy.opened(replica)
            self._change_open(replica, 1)
            entry.turn.set_result(None)

    def _has_place(self, replica: int) -> bool:
        limit = self.config.max_concurrent
        return limit is None or self._num_open[replica] < limit

    def _change_open(self, replica: int, change: int) -> None:
        self._num_open[replica] += change
        self._on_open(replica, self._num_open[replica])

    def _release(self, entry: _Entry) -> None:
        replica = entry.replica
        self._occupancy.closed(replica)
        self._change_open(replica, -1)
        self._routing.done(entry.request, replica)
        self._follow_fleet()
        if not self._queues[replica] and self.config.work_stealing and replica in self._accepting:
            self._steal(replica)
        self._start(replica)

    def _steal(self, thief: int) -> bool:
        """Move the waiting requests of the group that would start last from the replica with the most open work.

        Returns:
            Whether any request was waiting.
        """
        waiting = [i for i, queue in enumerate(self._queues) if queue]
        if not waiting:
            return False
        victim = max(waiting, key=lambda i: (self._routing.open_work[i], -i))
        group = affinity_of(self._queues[victim][-1].request)
        taken = [entry for entry in self._queues[victim] if affinity_of(entry.request) == group]
        self._queues[victim] = [entry for entry in self._queues[victim] if entry not in taken]
        for entry in taken:
            self._routing.move(entry.request, victim, thief)
            entry.replica = thief
        self._queues[thief].extend(taken)
        return True

    def _withdraw(self, entry: _Entry) -> None:
        """Remove a request whose result is no longer needed."""
        if entry in self._arrived:
            self._arrived.remove(entry)
        elif entry.turn.done() and not entry.turn.cancelled():
            self._release(entry)  # it has just been started
        elif entry.replica >= 0 and entry in self._queues[entry.replica]:
            self._queues[entry.replica].remove(entry)
            self._routing.done(entry.request, entry.replica)

    # Sampling

    async def _attempts(self, entry: _Entry) -> Completion:
        for attempt in range(self.config.max_retries + 1):
            try:
                completion = await self._attempt(entry)
                check_completion(completion, entry.request, self._origin)
                return completion
            except (RoleLostError, BackendTimeoutError, ContractError):
                raise  # it ends the run, or a retry would take as long or fail the same way
            except BackendError:
                if attempt == self.config.max_retries:
                    raise
                self.num_retries += 1
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, entry: _Entry) -> Completion:
        limit_s = self.config.request_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await self._fleet().generate(entry.request, entry.replica, self._told(entry.on_tokens))
        except TimeoutError:
            if not limit.expired():
                raise
        assert limit_s is not None, "only a limit expires"
        await self._end_in_engine(entry)
        raise BackendTimeoutError(
            f"request {entry.request.id!r} on replica {entry.replica} had no completion within {limit_s:g} s of its "
            "start (rollout.request_timeout_s). Raise it, or lower sampling.max_tokens or rollout.max_concurrent"
        )

    def _told(self, on_tokens: OnTokens | None) -> OnTokens | None:
        """What the fleet calls with tokens as they are sampled: counts them, and passes them on."""
        count = self._count_tokens
        if not self._streams or (count is None and on_tokens is None):
            return None

        def told(start: int, token_ids: list[int]) -> None:
            if count is not None:
                count(len(token_ids))
            if on_tokens is not None:
                on_tokens(start, token_ids)

        return told

    async def _end_in_engine(self, entry: _Entry) -> None:
        """Abort a request: most engines end it when its call is cancelled, all of them on an abort."""
        limit = asyncio.timeout(_ABORT_S)
        try:
            async with limit:
                await self._fleet().abort([entry.request.id])
        except TimeoutError:
            if not limit.expired():
                raise
        except BackendError:
            pass  # an engine that cannot abort will fail at its next call


class Rollouts:
    """The rollout managers of a run, one per generator role, each created on first use. Requests of the flow, of
    environments and of rewards go through them.

    Args:
        runtime: hosts the roles; passes on the requests that roles make to generators.
        config: section ``rollout``.
        roles: the planned roles, used in checking completions.
        count_tokens: called with the number of newly sampled tokens, for generators that stream.
    """

    turns_together = True

    def __init__(
        self,
        runtime: Runtime,
        config: RolloutConfig,
        roles: Mapping[str, RolePlan] | None = None,
        *,
        count_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self._roles = roles or {}
        self._count_tokens = count_tokens
        self._managers: dict[str, RolloutManager] = {}
        self.on_open: Callable[[str, int, int], None] = lambda role, replica, num_open: None
        """Called with a role, a replica and its number of open requests, whenever that changes."""
        runtime.ask_generator = self.ask

    def of(self, role: str) -> RolloutManager:
        """The manager of a generator role."""
        if role not in self._managers:
            record = self._roles[role].backend.record if role in self._roles else None
            streams = isinstance(record, GeneratorSpec) and record.streaming
            self._managers[role] = RolloutManager(
                lambda: self.runtime.generator(role),
                self.config,
                origin=origin_of(self._roles, role, "generator"),
                streams=streams,
                count_tokens=self._count_tokens,
                on_open=lambda replica, num_open: self.on_open(role, replica, num_open),
            )
        return self._managers[role]

    def begin(self) -> None:
        """See ``scheduler.GeneratorFront``."""
        for manager in self._managers.values():
            manager.begin()

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``scheduler.CompletionSource``."""
        assert request.generate_request is not None, "a flow over prompts gives every rollout a generation request"
        return await self.of(role).generate(request.generate_request, request.on_tokens)

    async def ask(self, role: str, request: GenerateRequest) -> Completion:
        """See ``Runtime.ask_generator``."""
        return await self.of(role).generate(request)

    def metrics(self) -> Metrics:
        """Metrics of all managers since ``begin``."""
        return merge_metrics(*(manager.metrics() for manager in self._managers.values()))
