"""Generator replicas that sample nothing and take the time that a cost model says, on a clock of their own.

A replica decodes all its running sequences together, as engines with continuous batching do: a step takes
``step_s + sequence_s * running``. The event loop's clock jumps from one timer to the next, so that hours take seconds,
and the same work always takes the same time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from chatlearn_core.executor.rollouts.occupancy import Occupancy
from chatlearn_core.protocols import OnTokens
from chatlearn_core.types import Completion, GenerateRequest, VersionSpan
from chatlearn_runtime_kit.replica_fleet import replica_index

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. The defaults are of the order of a 7B model on one GPU a replica."""

    step_s: float = 0.02
    """A decoding step, however many sequences run: reading the weights."""
    sequence_s: float = 0.0001
    """Beside it for each running sequence."""
    prefill_s: float = 0.00002
    """A token of context that is computed."""
    train_s: float = 0.0001
    """A token that is trained on."""
    sync_s: float = 2.0
    """A weight sync."""


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]  # it is a variable to mypy
    """Waits for nothing: the clock jumps instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every coroutine waits for another")
        self.now += max(0.0, timeout)
        return super().select(0)


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on an event loop whose clock jumps."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]  # the one clock that timers are compared with
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


@dataclass(eq=False)
class Sequence:
    """A request that runs."""

    request: GenerateRequest
    left: int
    """Tokens to sample."""
    spans: list[list[int]]
    """[start, stop, version]"""
    future: asyncio.Future[Completion]


class SimulatedReplica:
    """One engine with ``slots`` places; what does not fit waits in the order of its arrival."""

    def __init__(self, costs: Costs, slots: int, length_of: Callable[[str], int]) -> None:
        self.costs = costs
        self.slots = slots
        self.length_of = length_of
        self.version = 0
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.may_run = asyncio.Event()
        self.may_run.set()
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        prior = request.resume_from
        done = 0 if prior is None else len(prior.token_ids)
        stop = min(self.length_of(request.id), request.sampling.max_tokens)
        spans = [] if prior is None else [[s.start, s.stop, s.version] for s in prior.version_spans]
        sequence = Sequence(request, stop - done, spans, asyncio.get_running_loop().create_future())
        self.waiting.append(sequence)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await sequence.future
        finally:
            self.running = [other for other in self.running if other is not sequence]

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _work(self) -> None:
        while self.running or self.waiting:
            await self.may_run.wait()
            admitted = [self.waiting.popleft() for _ in range(min(self.slots - len(self.running), len(self.waiting)))]
            contexts = {s.request.group_id: context_length(s.request) for s in admitted}  # a group's prompt once
            self.running += admitted
            seconds = self.costs.step_s + self.costs.sequence_s * len(self.running)
            await asyncio.sleep(seconds + self.costs.prefill_s * sum(contexts.values()))
            for sequence in list(self.running):
                self._token(sequence)
            await asyncio.sleep(0)  # requests that were answered finish, and may ask for more
            await asyncio.sleep(0)

    def _token(self, sequence: Sequence) -> None:
        spans = sequence.spans
        count = spans[-1][1] if spans else 0
        if spans and spans[-1][2] == self.version:
            spans[-1][1] += 1
        else:
            spans.append([count, count + 1, self.version])
        sequence.left -= 1
        if sequence.left == 0 and not sequence.future.done():
            whole = count + 1 == self.length_of(sequence.request.id)
            sequence.future.set_result(completion(sequence.request, count + 1, spans, whole))
            self.running.remove(sequence)


class SimulatedFleet:
    """A ``GeneratorFleet`` of simulated replicas that keeps how idle they are."""

    name = "generator"

    def __init__(self, num_replicas: int, costs: Costs, slots: int, length_of: Callable[[str], int]) -> None:
        self.num_replicas = num_replicas
        self.accepting = frozenset(range(num_replicas))
        self.replicas = [SimulatedReplica(costs, slots, length_of) for _ in range(num_replicas)]
        self.measure()

    def measure(self) -> None:
        """Begin to measure occupancy."""
        open_now = [len(replica.running) + len(replica.waiting) for replica in self.replicas]
        self.occupancy = Occupancy(self.num_replicas, asyncio.get_running_loop().time, open_now)

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        index = replica_index(request, self.num_replicas) if replica is None else replica
        self.occupancy.opened(index)
        try:
            return await self.replicas[index].generate(request)
        finally:
            self.occupancy.closed(index)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Nothing here takes so long."""

    async def pause(self) -> None:
        for replica in self.replicas:
            replica.may_run.clear()

    async def resume(self) -> None:
        for replica in self.replicas:
            replica.may_run.set()

    async def close(self) -> None:
        """End what runs."""
        for replica in self.replicas:
            await replica.close()

    def serve(self, version: int) -> None:
        """New weights everywhere."""
        for replica in self.replicas:
            replica.version = version


def context_length(request: GenerateRequest) -> int:
    """Tokens to compute before the first one is sampled."""
    return len(request.prompt_ids) + (0 if request.resume_from is None else len(request.resume_from.token_ids))


def completion(request: GenerateRequest, count: int, spans: list[list[int]], whole: bool) -> Completion:
    """So many tokens, all alike."""
    return Completion(
        request_id=request.id,
        token_ids=np.zeros(count, np.int64),
        logprobs=np.zeros(count, np.float32),
        basis=request.sampling.basis,
        finish_reason="stop" if whole else "length",
        sampling=request.sampling,
        version_spans=tuple(VersionSpan(*span) for span in spans),
    )
