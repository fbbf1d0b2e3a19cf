"""The rollout manager: stands in front of the replicas of a generator role and decides who samples what, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, RoleLostError
from chatlearn_core.executor.rollouts.occupancy import Occupancy
from chatlearn_core.executor.rollouts.routing import Routing, affinity_of, longest_first
from chatlearn_core.executor.scheduler import RolloutRequest
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.protocols import GeneratorFleet, OnTokens, Runtime
from chatlearn_core.runtime.boundary import Origin, check_completion
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import Completion, GenerateRequest, Metrics, merge_metrics

_ABORT_S = 10.0
"""A replica that does not even take an abort for so long hangs: its next call tells."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request and its place: given when a replica may start it."""

    request: GenerateRequest
    turn: asyncio.Future[None]
    replica: int = -1


class RolloutManager:
    """Requests to the replicas of one generator role.

    Requests that are made in one turn of the event loop are a wave: they are spread over the replicas together, a
    group to one replica, and start in the order of their work, longest first. With ``max_concurrent`` a replica has at
    most so many open and gets the next as soon as one ends. What waits for a replica that takes no requests, since it
    loads weights or is rebuilt, goes to others that do. A request that fails on a living replica is made again
    ``max_retries`` times, in its place and with the same random numbers; one that takes longer than
    ``request_timeout_s`` is ended in the engine and given up. What a dead replica had is the fleet's matter.

    Args:
        fleet: gives the replicas; called again for every request, since a runtime may exchange the fleet.
        config: section ``rollout``.
        clock: seconds, for the share of time that replicas are idle.
        origin: whose completions these are, to check them by.
        count_tokens: called with the number of tokens that were sampled, as they come; None where they are not counted.
    """

    def __init__(
        self,
        fleet: Callable[[], GeneratorFleet],
        config: RolloutConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        origin: Origin | None = None,
        count_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self._on_tokens: OnTokens | None = None
        if count_tokens is not None:
            self._on_tokens = lambda start, token_ids: count_tokens(len(token_ids))
        self._origin = origin or Origin("generator", "a generator")
        self._fleet = fleet
        self._clock = clock
        self._arrived: list[_Entry] = []
        self._queues: list[list[_Entry]] = []
        """Of each replica: what waits for a place there, first first."""
        self._num_open: list[int] = []
        """Of each replica: requests that have been started."""
        self._routing = Routing(0)
        self._accepting: frozenset[int] = frozenset()
        """Replicas that took requests when that was looked at last."""
        self._occupancy = Occupancy(0, clock)
        self.num_retries = 0
        """Since ``begin``."""

    def begin(self) -> None:
        """A new batch of work, after which ``metrics`` will be asked for. Known prefixes are forgotten: what a batch is
        made of must not depend on the batches before it.
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

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises:
            ReplicaLostError: a replica died, and may not be rebuilt any more.
            BackendTimeoutError: no completion within ``rollout.request_timeout_s`` of its start, or the role's timeout.
            ContractError: the completion is not one that may be trained on.
            BackendError: the request failed, and its retries too.
        """
        if not self._queues:
            self.begin()
        entry = _Entry(request, asyncio.get_running_loop().create_future())
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
        """Since ``begin``: how idle replicas were, and what was retried."""
        return self._occupancy.metrics(self.num_retries)

    # Placing

    def _place_wave(self) -> None:
        wave, self._arrived = self._arrived, []
        wave = [entry for entry in wave if not entry.turn.done()]
        try:
            self._follow_fleet()
            self._queue_up(wave)
        except Exception as error:  # this callback is not awaited: pass the error to the requests that wait for a place
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
        """What waits for replicas that take no requests any more goes to those that do; one that takes them again gets
        its share of what waits for the others. If none does, everything stays where it is.
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
        """Let requests start while the replica has places."""
        queue = self._queues[replica]
        while queue and self._has_place(replica):
            entry = queue.pop(0)
            if entry.turn.done():  # cancelled, and about to withdraw
                self._routing.done(entry.request, replica)
                continue
            self._num_open[replica] += 1
            self._occupancy.opened(replica)
            entry.turn.set_result(None)

    def _has_place(self, replica: int) -> bool:
        limit = self.config.max_concurrent
        return limit is None or self._num_open[replica] < limit

    def _release(self, entry: _Entry) -> None:
        replica = entry.replica
        self._num_open[replica] -= 1
        self._occupancy.closed(replica)
        self._routing.done(entry.request, replica)
        self._follow_fleet()
        if not self._queues[replica] and self.config.work_stealing and replica in self._accepting:
            self._steal(replica)
        self._start(replica)

    def _steal(self, thief: int) -> bool:
        """Take over the group that would start last on the replica with the most open work, as far as it waits.

        Returns:
            Whether anything waited.
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
        """This request's result is no longer wanted."""
        if entry in self._arrived:
            self._arrived.remove(entry)
        elif entry.turn.done() and not entry.turn.cancelled():
            self._release(entry)  # it was just let in
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
                raise  # it ends the run; it would take as long again; it would be returned again
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
                return await self._fleet().generate(entry.request, entry.replica, self._on_tokens)
        except TimeoutError:
            if not limit.expired():
                raise
        assert limit_s is not None, "only a limit expires"
        await self._end_in_engine(entry)
        raise BackendTimeoutError(
            f"request {entry.request.id!r} on replica {entry.replica} had no completion within {limit_s:g} s of its "
            "start (rollout.request_timeout_s). Raise it, or lower sampling.max_tokens or rollout.max_concurrent"
        )

    async def _end_in_engine(self, entry: _Entry) -> None:
        """Cancelling a call ends its request in most engines; an abort does so in all."""
        limit = asyncio.timeout(_ABORT_S)
        try:
            async with limit:
                await self._fleet().abort([entry.request.id])
        except TimeoutError:
            if not limit.expired():
                raise
        except BackendError:
            pass  # an engine that cannot end it is found out by whatever it is asked next


class Rollouts:
    """The rollout managers of a run, one for each generator role, made when they are first asked for.

    Args:
        runtime: where the roles live.
        config: section ``rollout``.
        roles: as planned; completions are checked by them.
        count_tokens: called with the number of tokens that were sampled, as they come, where a generator streams.
    """

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

    def of(self, role: str) -> RolloutManager:
        """The manager of a generator role."""
        if role not in self._managers:
            record = self._roles[role].backend.record if role in self._roles else None
            streams = isinstance(record, GeneratorSpec) and record.streaming
            self._managers[role] = RolloutManager(
                lambda: self.runtime.generator(role),
                self.config,
                origin=origin_of(self._roles, role, "generator"),
                count_tokens=self._count_tokens if streams else None,
            )
        return self._managers[role]

    def begin(self) -> None:
        """See ``scheduler.GeneratorFront``."""
        for manager in self._managers.values():
            manager.begin()

    async def completion(self, role: str, request: RolloutRequest) -> Completion:
        """See ``scheduler.CompletionSource``."""
        assert request.generate_request is not None, "a flow over prompts gives every rollout a generation request"
        return await self.of(role).generate(request.generate_request)

    def metrics(self) -> Metrics:
        """Of all managers, since ``begin``."""
        return merge_metrics(*(manager.metrics() for manager in self._managers.values()))
