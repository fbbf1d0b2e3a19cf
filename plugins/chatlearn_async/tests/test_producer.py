"""Pacing on completions of very different lengths: all that is sampled is trained on, in the order of the draws."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_async.producer import AsyncRolloutProducer
from chatlearn_core.config.models import RolloutConfig, TrainConfig
from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.flow import trace
from chatlearn_core.protocols import PlainData
from chatlearn_core.types import Completion, ExampleDraw, GenerateRequest, Prompt, SamplingParams, VersionSpan

STEPS, PER_STEP, STALENESS, LONGEST = 12, 4, 3, 120


def length_of(group_id: str) -> int:
    """Every seventh prompt is answered at length."""
    number = int(group_id.partition("@")[0])
    return LONGEST if number % 7 == 3 else 4 + number % 5


class TurnFleet:
    """Samples a token in each turn of the event loop."""

    name, num_replicas, accepting = "generator", 1, frozenset({0})

    def __init__(self) -> None:
        self.version = 0
        self.aborted: set[str] = set()
        self.ended: list[str] = []
        """Groups in the order in which their completions ended."""
        self.fails: str | None = None

    async def generate(self, request: GenerateRequest, replica: int | None = None, on_tokens: Any = None) -> Completion:
        prior = request.resume_from
        versions = [] if prior is None else [s.version for s in prior.version_spans for _ in range(s.start, s.stop)]
        while len(versions) < length_of(request.group_id):
            await asyncio.sleep(0)
            if request.id == self.fails:
                raise RuntimeError("an engine's own error")
            if request.id in self.aborted:
                self.aborted.discard(request.id)
                return self._completion(request, versions, "abort")
            versions.append(self.version)
        self.ended.append(request.group_id)
        return self._completion(request, versions, "stop")

    def _completion(self, request: GenerateRequest, versions: list[int], reason: Any) -> Completion:
        spans = [
            VersionSpan(v.index(one), len(v) - v[::-1].index(one), one) for v in [versions] for one in sorted({*v})
        ]
        count = len(versions)
        basis, sampling = request.sampling.basis, request.sampling
        zeros = np.zeros(count, np.float32)
        return Completion(request.id, np.zeros(count, np.int64), zeros, basis, reason, sampling, tuple(spans))

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self.aborted |= set(request_ids or ())


class Draws:
    def __init__(self) -> None:
        self.count = 0

    def next_batch(self, size: int) -> list[ExampleDraw]:
        first, self.count = self.count, self.count + size
        return [ExampleDraw(Prompt(str(n), np.array([1]), "?"), 0, str(n)) for n in range(first, first + size)]


class Paced:
    """A producer over a ``TurnFleet``, and the loop around it."""

    def __init__(self, staleness: int = STALENESS) -> None:
        self.fleet, self.draws, self.state = TurnFleet(), Draws(), RunState({})
        runtime: Any = SimpleNamespace(generator=lambda role: self.fleet, data=PlainData(), devices=dict)
        rollouts = Rollouts(runtime, RolloutConfig())
        graph = trace(lambda prompts, m: m.generator.generate(prompts), {"generator": "generator"})
        algorithm: Any = SimpleNamespace(group_size=1)
        sampler: Any = self.draws
        self.producer = AsyncRolloutProducer(
            FlowScheduler(graph, runtime, front=rollouts),
            algorithm,
            sampler,
            SamplingParams(LONGEST + 1),
            seed=0,
            source=InterruptibleCompletions(rollouts, ["generator"], "abort"),
            state=self.state,
            train=TrainConfig(steps=STEPS, prompts_per_step=PER_STEP),
            max_staleness=staleness,
            serving=frozenset({"generator"}),
        )

    async def step(self, step: int, turns: int = 30) -> list[Any]:
        """Take a step's groups, train for so many turns of the event loop, and sync."""
        production = await self.producer.produce(step, PER_STEP)
        assert production.metrics["rollout/dropped_stale"].value == 0
        for _ in range(turns):
            await asyncio.sleep(0)
        await self.producer.before_sync()
        assert not self.producer.source._tasks, "nothing is sampled during a sync"
        self.state.policy_version = self.fleet.version = step
        await self.producer.updates_done()
        self.state.step = step
        return production.groups


async def test_the_lengths_that_are_trained_on_are_those_that_were_drawn() -> None:
    paced = Paced()
    await paced.producer.updates_done()
    taken, ages = [], []
    for step in range(1, STEPS + 1):
        groups = await paced.step(step)
        taken.append([group.draw.seed_key for group in groups])
        spans = [span for group in groups for sample in group.samples for t in sample.turns for span in t.version_spans]
        ages += [step - 1 - span.version for span in spans]
        for group in groups:
            assert [len(sample.token_ids) - 1 for sample in group.samples] == [length_of(group.id)]
    assert taken == [[str(n) for n in range(s * PER_STEP, (s + 1) * PER_STEP)] for s in range(STEPS)]
    assert paced.draws.count == STEPS * PER_STEP, "nothing is drawn that no step trains on"
    assert max(ages) == STALENESS
    assert min(ages) == 0
    drawn = [length_of(str(n)) for n in range(STEPS * PER_STEP)]
    first_to_end = [length_of(name) for name in paced.fleet.ended[: len(drawn) // 2]]
    assert np.mean(first_to_end) < 0.8 * np.mean(drawn), "taking what ends first would have preferred short answers"
    await paced.producer.close()


async def test_what_a_checkpoint_holds_is_in_the_order_of_the_draws() -> None:
    """A long completion of an early wave is unfinished, while the others of its wave and a later wave are finished."""
    paced = Paced()
    await paced.producer.updates_done()
    for step in (1, 2, 3):
        await paced.step(step, turns=20)
    pending = paced.producer.pending
    assert [group.draw.seed_key for group in pending] == [str(n) for n in range(12, 24)]
    assert [group.is_finished for group in pending] == [True] * 5 + [False] + [True] * 6
    made = {g.draw.seed_key: g.progress[0].turns for g in pending if not g.is_finished}
    partial = {key: requests[f"{key}@0#0"].num_tokens for key, requests in made.items()}
    assert 0 < partial["17"] < LONGEST, "drawn in step 2, and sampled under versions 1 and 2"
    await paced.producer.close()

    again = Paced()
    again.draws.count = paced.draws.count
    again.fleet.version = again.state.policy_version = again.state.step = 3
    again.producer.pending = pending
    await again.producer.updates_done()
    taken = [group for step in range(4, STEPS + 1) for group in await again.step(step)]
    assert [group.draw.seed_key for group in taken] == [str(n) for n in range(12, STEPS * PER_STEP)]
    [kept] = [group.samples[0] for group in taken if group.draw.seed_key == "17"]
    assert [span.version for span in kept.turns[0].version_spans][:3] == [1, 2, 3]
    assert kept.turns[0].version_spans[1].stop == partial["17"], "its tokens were kept"
    await again.producer.close()


async def test_a_failure_in_a_later_wave_is_raised_at_the_next_opportunity() -> None:
    paced = Paced()
    paced.fleet.fails = "9@0#0"
    await paced.producer.updates_done()
    with pytest.raises(RuntimeError, match="an engine's own error"):
        await paced.step(1)
    await paced.producer.close()
    assert not paced.producer.source._tasks


async def test_a_request_that_fails_excludes_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced()
    generate = TurnFleet.generate

    async def failing(self: TurnFleet, request: GenerateRequest, *arguments: Any) -> Completion:
        if request.id == "2@0#0":
            raise BackendError("out of memory")
        return await generate(self, request, *arguments)

    monkeypatch.setattr(TurnFleet, "generate", failing)
    await paced.producer.updates_done()
    groups = await paced.step(1)
    assert [group.samples[0].exclusion for group in groups] == [None, None, "generation failed: out of memory", None]
    await paced.producer.close()
