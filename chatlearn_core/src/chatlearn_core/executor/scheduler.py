"""Run a flow's graph over samples: every call starts as soon as what it needs is there.

Work streams: a sample is scored while others are still generated. What a call returns does not depend on when it
ran, so the result is the same whatever the timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.executor.phases import Phase
from chatlearn_core.flow import Graph, Node
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Runtime
from chatlearn_core.types import (
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


class FlowScheduler:
    """Runs one graph, step after step.

    Args:
        graph: the traced flow.
        runtime: where the roles live.
        temperature: the logits of trainer outputs are divided by it, as they were when sampling.
        group_rewards: reward roles that judge a whole group at a time.
        enter: is told when the first call of a kind begins.
    """

    def __init__(
        self,
        graph: Graph,
        runtime: Runtime,
        *,
        temperature: float = 1.0,
        group_rewards: frozenset[str] = frozenset(),
        enter: Callable[[Phase], None] | None = None,
    ) -> None:
        self.graph = graph
        self.runtime = runtime
        self.temperature = temperature or 1.0
        self.group_rewards = group_rewards
        self.enter = enter
        self._entered: set[Phase] = set()

    async def run(self, slots: Sequence[Slot], timers: Timers) -> list[Sample]:
        """Fill every slot; the samples come back in the order of the slots.

        A sample whose generation or reward failed is among them with ``exclusion`` set.

        Raises:
            ReplicaLostError: a generator died too often.
            BackendError: a trainer role failed, or every generation did; the first cause.
        """
        done = {node.index: [asyncio.Event() for _ in slots] for node in self.graph.nodes}
        self._entered = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in self.graph.nodes:
                    tasks.create_task(self._run_node(node, slots, done, timers))
        except ExceptionGroup as group:
            raise _first(group) from group
        samples = [_filled(slot) for slot in slots]
        if self.graph.calls("generate") and slots and all(sample.completion is None for sample in samples):
            raise BackendError(
                f"every one of {len(samples)} generations failed, the first with: {samples[0].exclusion}"
            )
        return samples

    async def _run_node(
        self, node: Node, slots: Sequence[Slot], done: dict[int, list[asyncio.Event]], timers: Timers
    ) -> None:
        inputs = [done[index] for index in node.inputs]
        finished = done[node.index]
        if node.method.name == "generate":
            self._announce(Phase.GENERATING)
            with timers.measure("generate"):
                async with asyncio.TaskGroup() as tasks:
                    for slot, event in zip(slots, finished, strict=True):
                        tasks.create_task(self._generate(node, slot, event))
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
            self._announce(Phase.COMPUTING)
            with timers.measure(f"compute/{node.role}"):
                await self._compute(node, [_filled(slot) for slot in slots])
            for event in finished:
                event.set()

    def _announce(self, phase: Phase) -> None:
        """Work of this kind begins in this run of the graph."""
        if self.enter is not None and phase not in self._entered:
            self._entered.add(phase)
            self.enter(phase)

    async def _generate(self, node: Node, slot: Slot, event: asyncio.Event) -> None:
        assert slot.request is not None, "a flow over prompts gives every slot a request"
        try:
            completion = await self.runtime.generator(node.role).generate(slot.request)
        except ReplicaLostError:
            raise
        except BackendError as error:
            slot.sample = _without_completion(slot, f"generation failed: {error}")
        else:
            slot.sample = sample_from_completion(slot.sample_id, slot.group_id, slot.prompt, completion)
            if not len(completion.token_ids):
                slot.sample.exclusion = "empty_completion"
        event.set()

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
        samples = [_filled(slots[i]) for i in indices]
        judged = [sample for sample in samples if sample.completion is not None]
        self._announce(Phase.SCORING)
        with timers.measure("reward"):
            results = await self.runtime.reward(node.role).score(judged) if judged else []
        for sample, result in zip(judged, results, strict=True):
            _set_reward(sample, result)
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
        values = (await self.runtime.trainer(node.role).compute(batch, request))[output]
        if output == "scores":
            for sample, score in zip(chosen, values.tolist(), strict=True):
                sample.sequence_data[node.field] = score
            return
        for sample, array in zip(chosen, per_sequence(values, batch.lengths), strict=True):
            sample.token_data[node.field] = array


def _set_reward(sample: Sample, result: RewardResult) -> None:
    sample.reward = result
    if result.error is not None and sample.exclusion is None:
        sample.exclusion = f"reward failed: {result.error}"


def _without_completion(slot: Slot, reason: str) -> Sample:
    tokens = slot.prompt.token_ids
    sample = Sample(slot.sample_id, slot.group_id, slot.prompt, tokens, tokens < 0)
    sample.exclusion = reason
    return sample


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
    return min(leaves, key=lambda error: (not isinstance(error, ReplicaLostError), not isinstance(error, BackendError)))
