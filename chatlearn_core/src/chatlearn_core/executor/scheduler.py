"""Run a flow's graph over samples: every call starts as soon as what it needs is there.

Work streams: a sample is scored while others are still generated. What a call returns does not depend on when it
ran, so the result is the same whatever the timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, RoleLostError
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.executor.memory import MemoryTurns, Turn
from chatlearn_core.executor.phases import Phase
from chatlearn_core.executor.sharing import use_of
from chatlearn_core.flow import Graph, Node
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Runtime
from chatlearn_core.runtime.boundary import check_outputs, checked_rewards
from chatlearn_core.runtime.plan import RolePlan, origin_of
from chatlearn_core.types import (
    SEQUENCE_OUTPUTS,
    Completion,
    GenerateRequest,
    OutputRequest,
    Prompt,
    RewardResult,
    Sample,
    pack_samples,
    per_sequence,
    sample_from_completion,
)


@dataclass(slots=True)
class Slot:
    """Place of one sample in a step: what is asked for, and later the sample itself."""

    sample_id: str
    group_id: str
    prompt: Prompt
    request: GenerateRequest | None = None
    """None for demonstrations, whose sample is there from the start."""
    sample: Sample | None = None
    left_out: bool = False
    """Its generation goes on after this run of the flow: nothing else is called for it, and no sample comes back."""


class CompletionSource(Protocol):
    """Who answers the flow's calls on generators."""

    async def completion(self, role: str, slot: Slot) -> Completion | None:
        """What the slot's request gave; None leaves the slot out.

        Raises:
            ReplicaLostError: a replica died, and may not be rebuilt any more.
            BackendError: this request failed.
        """


class GeneratorFront(CompletionSource, Protocol):
    """What stands between the flow and the generator replicas."""

    def begin(self) -> None:
        """A run of the flow begins."""


class FleetCompletions:
    """Asks the fleet itself, with nothing in front of it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def begin(self) -> None:
        """Nothing to prepare."""

    async def completion(self, role: str, slot: Slot) -> Completion:
        """See ``CompletionSource``."""
        assert slot.request is not None, "a flow over prompts gives every slot a request"
        return await self.runtime.generator(role).generate(slot.request)


class FlowScheduler:
    """Runs one graph, step after step.

    Args:
        graph: the traced flow.
        runtime: where the roles live.
        temperature: the logits of trainer outputs are divided by it, as they were when sampling.
        group_rewards: reward roles that judge a whole group at a time.
        enter: called when the first call of a kind begins.
        memory: gives calls their turn where roles share devices; by default none do.
        front: answers calls on generators; the fleets themselves by default.
        bases: what the generators say of their logprobs, by role; a role that is not among them is not held to it.
        roles: as planned; messages about what they return are led by their plugins.
    """

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        *,
        temperature: float = 1.0,
        group_rewards: frozenset[str] = frozenset(),
        enter: Callable[[Phase], None] | None = None,
        memory: MemoryTurns | None = None,
        front: GeneratorFront | None = None,
        bases: Mapping[str, DeclaredBases] | None = None,
        roles: Mapping[str, RolePlan] | None = None,
    ) -> None:
        self.graph = graph
        self.runtime = runtime
        self.temperature = temperature or 1.0
        self.group_rewards = group_rewards
        self.enter = enter
        self.memory = memory or MemoryTurns(runtime)
        self.bases = bases or {}
        self.front = front or FleetCompletions(runtime)
        self.roles = roles or {}
        self._entered: set[Phase] = set()
        self._levels = {node.index: level for level, nodes in enumerate(graph.levels) for node in nodes}

    async def run(self, slots: Sequence[Slot], timers: Timers, source: CompletionSource | None = None) -> list[Sample]:
        """Fill every slot; the samples come back in the order of the slots.

        A sample whose generation or reward failed is among them with ``exclusion`` set.

        Args:
            source: answers calls on generators in place of the front.

        Raises:
            ReplicaLostError: a generator died too often.
            BackendError: a trainer role failed, or every generation did; the first cause.
        """
        done = {node.index: [asyncio.Event() for _ in slots] for node in self.graph.nodes}
        self._entered = set()
        self.front.begin()
        source = source or self.front
        turns = self._turns(timers)
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in self.graph.nodes:
                    tasks.create_task(self._run_node(node, slots, done, timers, source, turns.get(node.index)))
        except ExceptionGroup as group:
            raise _first(group) from group
        finally:
            for turn in turns.values():
                turn.leave()
        samples = _kept(slots)
        if self.graph.calls("generate") and samples and all(sample.completion is None for sample in samples):
            raise BackendError(
                f"every one of {len(samples)} generations failed, the first with: {samples[0].exclusion}"
            )
        return samples

    def _turns(self, timers: Timers) -> dict[int, Turn]:
        """Places of all calls in the queues for their devices, level by level: by node index, none for rewards.

        They are taken before anything runs, so that calls which share a device follow one another in the same order in
        every step. Calls that share none run at the same time.
        """
        turns: dict[int, Turn] = {}
        for index, level in self._levels.items():  # in the order of levels
            use = use_of(self.graph.nodes[index])
            if use is not None:
                turns[index] = self.memory.turn(use, timers=timers, level=level)
        return turns

    async def _run_node(
        self,
        node: Node,
        slots: Sequence[Slot],
        done: dict[int, list[asyncio.Event]],
        timers: Timers,
        source: CompletionSource,
        turn: Turn | None,
    ) -> None:
        inputs = [done[index] for index in node.inputs]
        finished = done[node.index]
        if node.method.name == "generate":
            assert turn is not None, "a generator holds memory"
            self._enter_phase(Phase.GENERATING)
            # The turn lasts until the last completion: then nothing is sampled any more, and the generator may sleep.
            async with turn:
                with timers.measure("generate", role=node.role, level=self._levels[node.index]):
                    async with asyncio.TaskGroup() as tasks:
                        for slot, event in zip(slots, finished, strict=True):
                            tasks.create_task(_generate(node, slot, event, source, self.bases.get(node.role)))
        elif node.method.name == "score":
            async with asyncio.TaskGroup() as tasks:
                ready: asyncio.Queue[int] = asyncio.Queue()
                for index in range(len(slots)):
                    tasks.create_task(_announce(index, [events[index] for events in inputs], ready))
                await self._score(node, slots, finished, ready, tasks, timers)
        else:
            for events in inputs:
                for event in events:
                    await event.wait()
            assert turn is not None, "a trainer holds memory"
            self._enter_phase(Phase.COMPUTING)
            async with turn:
                level = self._levels[node.index]
                with timers.measure(f"compute/{node.role}", role=node.role, action=node.method.name, level=level):
                    await self._compute(node, _kept(slots))
            for event in finished:
                event.set()

    def _enter_phase(self, phase: Phase) -> None:
        """Work of this kind begins in this run of the graph."""
        if self.enter is not None and phase not in self._entered:
            self._entered.add(phase)
            self.enter(phase)

    async def _score(
        self,
        node: Node,
        slots: Sequence[Slot],
        finished: Sequence[asyncio.Event],
        ready: asyncio.Queue[int],
        tasks: asyncio.TaskGroup,
        timers: Timers,
    ) -> None:
        """Score whatever is ready in one call, again and again, while the rest is still being generated."""
        by_group = node.role in self.group_rewards
        group_size: dict[str, int] = {}
        for slot in slots:
            group_size[slot.group_id] = group_size.get(slot.group_id, 0) + 1
        waiting: dict[str, list[int]] = {}
        left = len(slots)
        while left:
            arrived = [await ready.get()]
            while not ready.empty():
                arrived.append(ready.get_nowait())
            left -= len(arrived)
            if by_group:
                complete: list[int] = []
                for index in arrived:
                    group = waiting.setdefault(slots[index].group_id, [])
                    group.append(index)
                    if len(group) == group_size[slots[index].group_id]:
                        complete.extend(sorted(group))
                arrived = complete
            if arrived:
                tasks.create_task(self._score_now(node, slots, sorted(arrived), finished, timers))

    async def _score_now(
        self,
        node: Node,
        slots: Sequence[Slot],
        indices: Sequence[int],
        finished: Sequence[asyncio.Event],
        timers: Timers,
    ) -> None:
        samples = _kept([slots[i] for i in indices])
        judged = [sample for sample in samples if sample.completion is not None]
        self._enter_phase(Phase.SCORING)
        with timers.measure("reward", role=node.role, action="score", level=self._levels[node.index]):
            verdicts = await self.runtime.reward(node.role).score(judged) if judged else []
        results = checked_rewards(verdicts, judged)
        for index, sample in enumerate(judged):
            _set_reward(sample, RewardResult(None, error=results) if isinstance(results, str) else results[index])
        for index in indices:
            finished[index].set()

    async def _compute(self, node: Node, samples: Sequence[Sample]) -> None:
        """One trainer call over all samples that have tokens; the result goes to each sample."""
        output = node.method.output
        assert output is not None, f"{node.name} is not a trainer call"
        chosen = [sample for sample in samples if sample.loss_mask.any()]
        if not chosen:
            return
        batch = pack_samples(chosen)
        request = OutputRequest(frozenset({output}), temperature=self.temperature)
        outputs = await self.runtime.trainer(node.role).compute(batch, request)
        check_outputs(outputs, batch, request, origin_of(self.roles, node.role, "trainer"))
        values = outputs[output]
        if output in SEQUENCE_OUTPUTS:
            for sample, score in zip(chosen, values.tolist(), strict=True):
                sample.sequence_data[node.field] = score
            return
        for sample, array in zip(chosen, per_sequence(values, batch.lengths), strict=True):
            sample.token_data[node.field] = array


async def _generate(
    node: Node, slot: Slot, event: asyncio.Event, source: CompletionSource, bases: DeclaredBases | None
) -> None:
    try:
        completion = await source.completion(node.role, slot)
    except RoleLostError:
        raise
    except BackendTimeoutError as error:
        slot.sample = _without_completion(slot, f"generation timed out: {error}")
    except BackendError as error:
        slot.sample = _without_completion(slot, f"generation failed: {error}")
    else:
        if completion is None:
            slot.left_out = True
        elif completion.finish_reason == "abort":
            length = len(completion.token_ids)
            slot.sample = _without_completion(slot, f"generation failed: aborted after {length} tokens, unasked")
        else:
            if bases is not None:
                bases.check(completion)
            slot.sample = sample_from_completion(slot.sample_id, slot.group_id, slot.prompt, completion)
            if not len(completion.token_ids):
                slot.sample.exclusion = "empty_completion"
    event.set()


def _set_reward(sample: Sample, result: RewardResult) -> None:
    sample.reward = result
    if result.error is not None and sample.exclusion is None:
        sample.exclusion = f"reward failed: {result.error}"


def _without_completion(slot: Slot, reason: str) -> Sample:
    tokens = slot.prompt.token_ids
    sample = Sample(slot.sample_id, slot.group_id, slot.prompt, tokens, tokens < 0)
    sample.exclusion = reason
    return sample


def _kept(slots: Sequence[Slot]) -> list[Sample]:
    """The samples of all slots that are not left out."""
    return [_filled(slot) for slot in slots if not slot.left_out]


def _filled(slot: Slot) -> Sample:
    assert slot.sample is not None, f"slot {slot.sample_id} was not filled"
    return slot.sample


async def _announce(index: int, events: Sequence[asyncio.Event], ready: asyncio.Queue[int]) -> None:
    for event in events:
        await event.wait()
    ready.put_nowait(index)


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The most serious of several errors that were raised at the same time; the others stay in its cause."""
    leaves: list[Exception] = []
    stack: list[Exception] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, ExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=lambda error: (not isinstance(error, RoleLostError), not isinstance(error, BackendError)))
