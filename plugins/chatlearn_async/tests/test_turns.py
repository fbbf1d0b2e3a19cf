"""Rollouts of several turns in the producer: a slow tool, and a checkpoint in the middle of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_async.producer import AsyncRolloutProducer
from chatlearn_core.config.models import RolloutConfig, TrainConfig
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import trace
from chatlearn_core.protocols import GenerateFor, PlainData, RolloutContext, RolloutOrder
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    GenerateRequest,
    Prompt,
    RewardResult,
    Rollout,
    Sample,
    SamplingParams,
    VersionSpan,
)

TURNS, TOKENS, PER_STEP = 3, 6, 4


class Fleet:
    """Samples a token in each turn of the event loop: one that the whole sequence and the seed determine."""

    name, num_replicas, accepting = "generator", 1, frozenset({0})

    def __init__(self) -> None:
        self.version = 0
        self.aborted: set[str] = set()
        self.sampled: list[tuple[str, int]] = []
        """Request and position of every sampled token."""

    async def generate(self, request: GenerateRequest, replica: int | None = None, on_tokens: Any = None) -> Completion:
        prior = request.resume_from
        ids = [] if prior is None else prior.token_ids.tolist()
        spans = [] if prior is None else list(prior.version_spans)
        start, reason = len(ids), "length"
        while len(ids) < TOKENS:
            await asyncio.sleep(0)
            if request.id in self.aborted:
                self.aborted.discard(request.id)
                reason = "abort"
                break
            self.sampled.append((request.id, len(ids)))
            ids.append((int(request.prompt_ids.sum()) + sum(ids) + request.sampling.seed % 97) % 50)
        if len(ids) > start:
            spans.append(VersionSpan(start, len(ids), self.version))
        return Completion(
            request.id,
            np.array(ids, np.int64),
            np.zeros(len(ids), np.float32),
            request.sampling.basis,
            reason,  # type: ignore[arg-type]  # one of the two
            request.sampling,
            tuple(spans),
        )

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self.aborted |= set(request_ids or ())


class Talk:
    """Takes turns with a tool, which may take long."""

    def __init__(self) -> None:
        self.tool: Callable[[str, int], Any] = _quick
        """``await tool(rollout, turn)``: the tokens that it answers."""

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        context = RolloutContext(order, None, generate)
        sequence = context.sequence()
        for turn in range(TURNS):
            if turn:
                sequence.observed(await self.tool(order.id, turn))
            sequence.sampled(await context.generate(sequence.token_ids))
        return context.finished([sequence])


async def _quick(rollout: str, turn: int) -> list[int]:
    return [100 + turn]


class Draws:
    def __init__(self) -> None:
        self.count = 0

    def next_batch(self, size: int) -> list[ExampleDraw]:
        first, self.count = self.count, self.count + size
        return [ExampleDraw(Prompt(str(n), np.array([n + 1]), "?"), 0, str(n)) for n in range(first, first + size)]


class Scores:
    """A reward: the number of tokens."""

    def __init__(self) -> None:
        self.judged: list[str] = []

    async def score(self, samples: Any) -> list[RewardResult]:
        self.judged += [sample.id for sample in samples]
        return [RewardResult(float(len(sample.token_ids))) for sample in samples]


class Run:
    """A producer over the fakes, two steps ahead."""

    def __init__(self, **options: Any) -> None:
        self.fleet, self.talk, self.scores, self.draws, self.state = Fleet(), Talk(), Scores(), Draws(), RunState({})
        runtime: Any = SimpleNamespace(
            generator=lambda role: self.fleet,
            environment=lambda role: self.talk,
            reward=lambda role: self.scores,
            data=PlainData(),
            devices=dict,
        )
        rollouts = Rollouts(runtime, RolloutConfig())
        kinds = {"generator": "generator", "talk": "environment", "reward": "reward"}
        role: Any = SimpleNamespace(
            uses={"policy": "generator"}, timeout_s=60.0, max_turns=None, origin=Origin("fake", "role talk")
        )

        def flow(prompts: Any, m: Any) -> Any:
            samples = m.talk.rollout(prompts)
            return m.join(samples, m.reward.score(samples))

        self.source = InterruptibleCompletions(rollouts, ["generator"], options.pop("how", "abort"), **options)
        algorithm: Any = SimpleNamespace(group_size=1)
        sampler: Any = self.draws
        self.producer = AsyncRolloutProducer(
            FlowScheduler(trace(flow, kinds), runtime, front=rollouts, roles={"talk": role}),
            algorithm,
            sampler,
            SamplingParams(TOKENS),
            seed=0,
            source=self.source,
            state=self.state,
            train=TrainConfig(steps=9, prompts_per_step=PER_STEP),
            max_staleness=2,
            serving=frozenset({"generator"}),
        )

    async def sync(self, step: int) -> None:
        await self.producer.before_sync()
        self.state.policy_version = self.fleet.version = step
        await self.producer.updates_done()
        self.state.step = step

    async def step(self, step: int) -> list[Sample]:
        groups = (await self.producer.produce(step, PER_STEP)).groups
        await self.sync(step)
        return [sample for group in groups for sample in group.samples]


async def turns(count: int) -> None:
    """So many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("together", [False, True])
async def test_a_slow_tool_delays_its_own_rollout_alone_unless_turns_are_taken_together(together: bool) -> None:
    run = Run(turns_together=together)
    answered = asyncio.Event()

    async def tool(rollout: str, turn: int) -> list[int]:
        if rollout == "1@0#0":
            await answered.wait()
        return [100 + turn]

    run.talk.tool = tool
    await run.producer.updates_done()
    step = asyncio.ensure_future(run.producer.produce(1, PER_STEP))
    await turns(500)
    sampled = {request for request, _ in run.fleet.sampled if int(request.partition("@")[0]) < PER_STEP}
    others = {f"{n}@0#0" for n in (0, 2, 3)}
    if together:
        assert sampled == {f"{name}/0" for name in (*others, "1@0#0")}, "nobody takes a second turn"
        assert "0@0#0" not in run.scores.judged
    else:
        assert sampled == {"1@0#0/0", *(f"{name}/{turn}" for name in others for turn in range(TURNS))}
        assert others <= set(run.scores.judged), "their rewards do not wait either"
    assert not step.done()
    answered.set()
    assert len((await step).groups) == PER_STEP
    await run.producer.close()
