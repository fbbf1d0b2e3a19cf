"""Runs a flow's graph over samples: every call starts as soon as its inputs are ready.

Work streams: a sample is scored while others are still being generated. The result of a call does not depend on when it
ran, so timing does not affect results.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from chatlearn_core.batching import SamplePacker
from chatlearn_core.exceptions import BackendError, RoleLostError
from chatlearn_core.executor.colocation import ColocationManager, DeviceLease
from chatlearn_core.executor.device_sharing import uses_of
from chatlearn_core.executor.flow_functions import FlowFunctions
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import Graph, Node
from chatlearn_core.metrics import Timers
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import Runtime
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.plan import RunPlan, origin_of
from chatlearn_core.types import Completion, Sample, SamplingParams

if TYPE_CHECKING:
    from chatlearn_core.executor.cached_calls import CachedCalls

_PHASES = {"generator": Phase.GENERATING, "environment": Phase.GENERATING, "trainer": Phase.COMPUTING}
"""Phase of the run during calls on roles of a kind; all other calls are scoring."""


class CompletionSource(Protocol):
    """Answers the flow's calls on generators."""

    turns_together: bool
    """Whether the requests of concurrent rollouts proceed together, so that what an engine batches does not depend on
    how long environments take."""

    async def completion(self, role: str, request: RolloutRequest) -> Completion | None:
        """The completion of the generation request; None leaves the rollout out. ``request.sample_id`` is that of the
        rollout, which may make several requests.

        Raises:
            ReplicaLostError: a replica died and has no restarts left.
            BackendError: this request failed.
        """


class GeneratorFront(CompletionSource, Protocol):
    """A completion source between the flow and the generator replicas."""

    def begin(self) -> None:
        """Called when a run of the flow begins."""


@dataclass(slots=True, frozen=True)
class FlowCall:
    """One call of a flow during its execution."""

    node: Node
    graph: Graph
    runtime: Runtime
    source: CompletionSource
    """Answers calls on generators."""
    sampling: SamplingParams
    """The run's sampling parameters."""
    seed: int
    """The run's seed."""
    functions: FlowFunctions
    origin: Origin
    """Plugin and role that return the values, for messages."""
    bases: DeclaredBases | None = None
    """The bases that the generator declares for its logprobs."""
    plan: RunPlan | None = None
    """The run's plan; None outside runs."""
    max_length: int = 1 << 62
    """Longest sequence of the run, tokens."""
    cached: CachedCalls | None = None
    """What calls that are kept on disk read; None in a flow that makes all its calls."""
    packer: SamplePacker = field(default_factory=SamplePacker)
    """Packs the samples for all calls of this run of the flow."""
    fields: frozenset[str] = frozenset()
    """Names of all data that calls of this flow add to samples."""
    done: Callable[[RolloutRequest], None] = lambda request: None
    """Tells that the call is done for a request; an action may tell it before it is done for the others."""


class FlowScheduler:
    """Runs one graph, step after step.

    Args:
        graph: the traced flow.
        runtime: hosts the roles.
        front: answers calls on generators.
        stage: the calls of the graph to execute; the results of other calls must already exist. All by default.
        sampling: the run's parameters, used unless a call sets its own; trainers divide their logits by its
            temperature.
        seed: the run's; keys the random numbers of further turns.
        group_rewards: reward roles that judge a whole group at a time.
        during: context entered while calls of a phase run.
        colocation: leases devices for calls if roles share them; by default none do.
        bases: bases declared by the generators, by role; completions of other roles are not checked.
        plan: the run's; messages about results of its roles name their plugins.
        max_length: longest sequence of the run, tokens.
        cached: what the graph's reads read (``cached_calls.reading_graph``).
    """

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        front: GeneratorFront,
        *,
        stage: Sequence[Node] | None = None,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        group_rewards: frozenset[str] = frozenset(),
        during: Callable[[Phase], AbstractContextManager[None]] | None = None,
        colocation: ColocationManager | None = None,
        bases: Mapping[str, DeclaredBases] | None = None,
        plan: RunPlan | None = None,
        max_length: int = 1 << 62,
        cached: CachedCalls | None = None,
    ) -> None:
        self.cached = cached
        self.max_length = max_length
        self.graph = graph
        self.stage = tuple(graph.nodes if stage is None else stage)
        self.runtime = runtime
        self.sampling = sampling or SamplingParams(max_tokens=1)
        self.seed = seed
        self.group_rewards = group_rewards
        self.during = during or _no_phase
        self.colocation = colocation or ColocationManager(runtime)
        self.bases = bases or {}
        self.front = front
        self.plan = plan
        self.roles = plan.roles if plan else {}
        self._functions = FlowFunctions()
        self._fields = frozenset(name for node in graph.nodes for name in node.fields)
        self._actions = {node.index: resolve_import_string(node.method.action) for node in self.stage}
        levels = {node.index: level for level, nodes in enumerate(graph.levels) for node in nodes}
        self._levels = {index: level for index, level in levels.items() if index in self._actions}

    async def run(
        self,
        requests: Sequence[RolloutRequest],
        timers: Timers,
        source: CompletionSource | None = None,
        packer: SamplePacker | None = None,
    ) -> list[Sample]:
        """Fill every request and return the samples in request order.

        A sample whose generation or reward failed is included, with ``exclusion`` set.

        Args:
            source: answers calls on generators in place of the front.
            packer: packs the samples; given if they are needed packed after this run, too.

        Raises:
            ReplicaLostError: a generator died more often than its restart limit allows.
            BackendError: a trainer role failed, or every generation failed; the first cause.
        """
        done = {node.index: {request.sample_id: asyncio.Event() for request in requests} for node in self.stage}
        for request in requests:
            request.calls_left = len(self.stage)
        if any(_PHASES.get(node.kind) is Phase.GENERATING for node in self.stage):
            self.front.begin()
        source, packer = source or self.front, packer or SamplePacker()
        leases = self._leases(timers)
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in self.stage:
                    call = self._call(node, source, packer, partial(_tell, done[node.index]))
                    tasks.create_task(self._run_node(call, requests, done, timers, leases.get(node.index)))
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            for lease in leases.values():
                lease.leave()
        samples = _kept(requests)
        made = any(node.method.takes == "examples" for node in self.stage)
        if made and samples and not any(sample.turns for sample in samples):
            raise BackendError(
                f"every one of {len(samples)} generations failed, the first with: {samples[0].exclusion}"
            )
        return samples

    def close(self) -> None:
        """End the threads that users' functions ran in."""
        self._functions.close()

    def _leases(self, timers: Timers) -> dict[int, DeviceLease]:
        """Device leases of all calls except rewards, by node index, requested level by level.

        They are requested before anything runs, so that calls that share a device run in the same order in every step.
        Calls that share none run concurrently.
        """
        leases: dict[int, DeviceLease] = {}
        for index, level in self._levels.items():  # ordered by level
            uses = uses_of(self.graph.nodes[index], self.roles)
            if uses:
                leases[index] = self.colocation.lease(*uses, timers=timers, level=level)
        return leases

    async def _run_node(
        self,
        call: FlowCall,
        requests: Sequence[RolloutRequest],
        done: Mapping[int, Mapping[str, asyncio.Event]],
        timers: Timers,
        lease: DeviceLease | None,
    ) -> None:
        """Execute one call for all its samples, and signal each sample when it is done."""
        node = call.node
        own: list[int] = []
        for index, request in enumerate(requests):
            if not node.samples_of or request.maker is None or request.maker in node.samples_of:
                own.append(index)
            else:
                call.done(request)
        needs = [done[number] for number in node.inputs if number in done]
        ready: asyncio.Queue[int] = asyncio.Queue()
        with contextlib.ExitStack() as phase:  # lasts from the first call to the last
            work = _Work(call, self._actions[node.index], requests, timers, phase)
            if node.granularity == "batch":
                for events in needs:
                    for index in own:
                        await events[requests[index].sample_id].wait()
                async with lease or contextlib.nullcontext():
                    with self._generation(node, timers):
                        await self._carry_out(work, own)
                return
            if node.kind == "generator":
                self._enter_phase(work)
            # A generator's lease ends with its last completion: nothing more is sampled, so it may be offloaded.
            async with lease or contextlib.nullcontext():
                with self._generation(node, timers):
                    async with asyncio.TaskGroup() as tasks:
                        for index in own:
                            name = requests[index].sample_id
                            pending = [events[name] for events in needs if not events[name].is_set()]
                            if pending:
                                tasks.create_task(_announce(index, pending, ready))
                            else:
                                ready.put_nowait(index)
                        async for unit in self._units(node, requests, own, ready):
                            tasks.create_task(self._carry_out(work, unit))

    async def _units(
        self, node: Node, requests: Sequence[RolloutRequest], own: Sequence[int], ready: asyncio.Queue[int]
    ) -> AsyncIterator[list[int]]:
        """Yield the samples to process together as they become ready: one sample or a whole group; for rewards, whose
        workers divide the work themselves, everything that became ready meanwhile.
        """
        by_group = node.granularity == "group" or node.role in self.group_rewards
        group_size = Counter(requests[index].group_id for index in own if by_group)
        waiting: dict[str, list[int]] = {}
        left = len(own)
        while left:
            arrived = [await ready.get()]
            while not ready.empty():
                arrived.append(ready.get_nowait())
            left -= len(arrived)
            units: list[list[int]] = []
            for index in arrived:
                if not by_group:
                    units.append([index])
                    continue
                group_id = requests[index].group_id
                unit = waiting.setdefault(group_id, [])
                unit.append(index)
                if len(unit) == group_size[group_id]:
                    units.append(sorted(unit))
            if node.kind == "reward" and units:
                units = [sorted(index for unit in units for index in unit)]
            for unit in units:
                yield unit

    async def _carry_out(self, work: _Work, unit: Sequence[int]) -> None:
        """Execute one call for samples that are ready; skip samples that were left out or dropped."""
        node = work.call.node
        live = [work.requests[i] for i in unit if not work.requests[i].left_out and not work.requests[i].dropped]
        if live:
            self._enter_phase(work)
            with self._measured(node, work.timers):
                await work.action(work.call, live)
        for index in unit:
            work.call.done(work.requests[index])

    def _call(
        self, node: Node, source: CompletionSource, packer: SamplePacker, done: Callable[[RolloutRequest], None]
    ) -> FlowCall:
        return FlowCall(
            node,
            self.graph,
            self.runtime,
            source,
            self.sampling,
            self.seed,
            self._functions,
            origin_of(self.roles, node.role, node.kind),
            self.bases.get(node.role),
            self.plan,
            self.max_length,
            self.cached,
            packer,
            self._fields,
            done,
        )

    def _generation(self, node: Node, timers: Timers) -> AbstractContextManager[object]:
        """Measures all calls on a generator as one."""
        if node.kind != "generator":
            return contextlib.nullcontext()
        return timers.measure("generate", role=node.role, level=self._levels[node.index])

    def _measured(self, node: Node, timers: Timers) -> AbstractContextManager[object]:
        """Measures one call of a function or on a role other than a generator."""
        if node.kind == "generator":
            return contextlib.nullcontext()
        names = {"reward": "reward", "trainer": f"compute/{node.role}", "environment": "generate"}
        name = names.get(node.kind, node.kind)
        action = node.method.method if node.function is None else node.function.name
        return timers.measure(name, role=node.role, action=action, level=self._levels[node.index])

    def _enter_phase(self, work: _Work) -> None:
        """Enter the phase when the first call of a node begins."""
        if not work.has_begun:
            work.has_begun = True
            work.phase.enter_context(self.during(_PHASES.get(work.call.node.kind, Phase.SCORING)))


@dataclass(slots=True)
class _Work:
    """The state of one call in one run of the graph."""

    call: FlowCall
    action: Callable[[FlowCall, Sequence[RolloutRequest]], Awaitable[None]]
    requests: Sequence[RolloutRequest]
    timers: Timers
    phase: contextlib.ExitStack
    """Contexts entered when the first call begins and left after the last."""
    has_begun: bool = False


def _tell(events: Mapping[str, asyncio.Event], request: RolloutRequest) -> None:
    """A call, whose events these are, is done for a request."""
    if not events[request.sample_id].is_set():
        events[request.sample_id].set()
        assert request.calls_left is not None, "its run counts them"
        request.calls_left -= 1


def _no_phase(phase: Phase) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def _kept(requests: Sequence[RolloutRequest]) -> list[Sample]:
    """The samples of all requests that are not left out."""
    return [sample for request in requests if not request.left_out for sample in request.samples]


async def _announce(index: int, events: Sequence[asyncio.Event], ready: asyncio.Queue[int]) -> None:
    for event in events:
        await event.wait()
    ready.put_nowait(index)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The most serious of several concurrent errors; the others stay in its cause."""
    leaves: list[Exception] = []
    stack: list[Exception] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, ExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=lambda error: (not isinstance(error, RoleLostError), not isinstance(error, BackendError)))
