"""Rollouts of several turns in the producer: a slow tool, and a checkpoint in the middle of conversations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_async.admissions import AdmissionLog, Replay
from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_async.producer import AsyncRolloutProducer
from chatlearn_core.config.models import RolloutConfig, TrainConfig
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.saved import load_rollouts, save_rollouts
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import trace
from chatlearn_core.plugins.records import EnvironmentSpec
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
from chatlearn_testing.fakes.records import FAKE_GENERATOR

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
        while len(ids) < request.sampling.max_tokens:
            await asyncio.sleep(0)
            if request.id in self.aborted:
                self.aborted.discard(request.id)
                reason = "abort"
                break
            self.sampled.append((request.id, len(ids)))
            ids.append((int(request.prompt_ids.sum()) + sum(ids) + request.sampling.seed % 97) % 50)
            if on_tokens is not None:
                on_tokens(len(ids) - 1, ids[-1:])
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


async def _later(rollout: str, turn: int) -> list[int]:
    """A tool that takes the longer the later its prompt was drawn."""
    await turns(7 * int(rollout.partition("@")[0]))
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
        record = EnvironmentSpec(name="talk", factory="fake:Talk", options="fake:Options")
        role: Any = SimpleNamespace(
            name="talk",
            kind="environment",
            backend=SimpleNamespace(record=record),
            uses={"policy": "generator"},
            timeout_s=60.0,
            max_turns=None,
            origin=Origin("fake", "role talk"),
        )
        plan: Any = SimpleNamespace(roles={"talk": role})

        def flow(prompts: Any, m: Any) -> Any:
            samples = m.talk.rollout(prompts)
            return m.join(samples, m.reward.score(samples))

        self.source = InterruptibleCompletions(
            rollouts, ["generator"], options.pop("how", "abort"), **{"turns_together": False} | options
        )
        algorithm: Any = SimpleNamespace(group_size=1)
        sampler: Any = self.draws
        self.producer = AsyncRolloutProducer(
            FlowScheduler(trace(flow, kinds), runtime, front=rollouts, plan=plan),
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


def restarted(run: Run, step: int, folder: Path, **options: Any) -> Run:
    """Another run, which goes on from a checkpoint that was written to the disk after ``step``."""
    again = Run(**options)
    save_rollouts(folder, run.producer.pending, {"groups": []})
    examples = [draw.example for draw in Draws().next_batch(99)]
    again.producer.pending = load_rollouts(folder, examples, again.producer.requests_of).pending
    again.draws.count = run.draws.count
    again.fleet.version = again.state.policy_version = again.state.step = step
    return again


async def killed(run: Run, when: Callable[[], bool]) -> None:
    """A step, and what a checkpoint holds that is written at that moment; then everything is gone."""
    await run.producer.updates_done()
    await run.producer.produce(1, PER_STEP)
    for _ in range(1000):
        if when():
            break
        await asyncio.sleep(0)
    else:
        raise AssertionError("the moment does not come")
    await run.producer.before_sync()
    await run.producer.close()


def tokens_of(samples: list[Sample]) -> dict[str, list[int]]:
    return {sample.id: sample.token_ids.tolist() for sample in samples}


async def test_a_killed_run_goes_on_in_the_middle_of_its_conversations(tmp_path: Path) -> None:
    run = Run()
    held = asyncio.Event()

    async def tool(rollout: str, turn: int) -> list[int]:
        if rollout in ("4@0#0", "9@0#0") and turn == 2:
            await held.wait()
        return [100 + turn]

    async def late(rollout: str, turn: int) -> list[int]:
        await _later(rollout, turn)
        return await tool(rollout, turn)

    run.talk.tool = late
    sampled = run.fleet.sampled
    await killed(run, lambda: "5@0#0" in run.scores.judged and 0 < sampled[-1][1] < TOKENS - 1)
    judged, before = set(run.scores.judged), set(sampled)
    pending = {group.id: group for group in run.producer.pending}
    assert len(pending) == 2 * PER_STEP
    finished = {group.requests[0].sample_id for group in pending.values() if group.is_finished}
    assert finished, "scored, though their waves were not done"
    assert finished <= judged
    made = {name: group.progress[0].turns for name, group in pending.items() if not group.is_finished}
    assert list(made["4@0"]) == ["4@0#0/0", "4@0#0/1"]
    assert all(one.ended for one in made["4@0"].values())
    cut = {request for requests in made.values() for request, one in requests.items() if not one.ended}
    assert cut, "unfinished turns have their tokens"

    again = restarted(run, 1, tmp_path)
    again.talk.tool = tool
    held.set()
    await again.producer.updates_done()
    taken = [sample for step in (2, 3) for sample in await again.step(step)]
    await again.producer.close()
    assert not before & set(again.fleet.sampled), "no token is sampled twice"
    assert not finished & set(again.scores.judged), "nor a sample scored twice"

    undisturbed = Run()
    await undisturbed.producer.updates_done()
    expected = [sample for step in (1, 2, 3) for sample in await undisturbed.step(step)][PER_STEP:]
    await undisturbed.producer.close()
    assert tokens_of(taken) == tokens_of(expected), "these fakes sample the same under all weights"
    by_id = {sample.id: sample for sample in taken}
    versions = [[span.version for span in turn.version_spans] for turn in by_id["4@0#0"].turns]
    assert versions == [[0], [0], [1]], "each turn has the versions that sampled it"
    [two] = [turn for sample in taken for turn in sample.turns if turn.request_id == sorted(cut)[0]]
    assert [span.version for span in two.version_spans] == [0, 1]


async def test_a_rollout_that_goes_another_way_than_before_is_sampled_from_there(tmp_path: Path) -> None:
    run = Run()
    held = asyncio.Event()

    async def tool(rollout: str, turn: int) -> list[int]:
        if rollout == "4@0#0" and turn == 2:
            await held.wait()
        return [100 + turn]

    run.talk.tool = tool
    await killed(run, lambda: ("4@0#0/1", TOKENS - 1) in run.fleet.sampled)

    async def another(rollout: str, turn: int) -> list[int]:
        return [200 + turn] if rollout == "4@0#0" else [100 + turn]

    again = restarted(run, 1, tmp_path)
    again.talk.tool = another
    await again.producer.updates_done()
    samples = {sample.id: sample for sample in await again.step(2)}
    sampled = {name for name, _ in again.fleet.sampled if name.startswith("4@")}
    assert sampled == {"4@0#0/1", "4@0#0/2"}, "its first turn has the same prompt"
    assert [[span.version for span in turn.version_spans] for turn in samples["4@0#0"].turns] == [[0], [1], [1]]
    assert 201 in samples["4@0#0"].token_ids
    await again.producer.close()


async def test_completions_that_pause_in_the_engine_are_in_a_checkpoint(tmp_path: Path) -> None:
    run = Run(how="pause", resumable=True)
    run.producer.save_every, run.talk.tool = 1, _later
    await killed(run, lambda: 0 < run.fleet.sampled[-1][1] < TOKENS - 1)
    again = restarted(run, 1, tmp_path, how="pause", resumable=True)
    await again.producer.updates_done()
    await again.producer.produce(2, PER_STEP)
    await again.producer.close()
    assert not set(run.fleet.sampled) & set(again.fleet.sampled)


async def spans_of(run: Run, spins: int) -> dict[str, list[list[tuple[int, int, int]]]]:
    """Five steps of the run, with so many turns of the event loop for each: the versions of all turns by sample."""
    await run.producer.updates_done()
    found = {}
    for step in range(1, 6):
        for group in (await run.producer.produce(step, PER_STEP)).groups:
            for sample in group.samples:
                found[sample.id] = [[(s.start, s.stop, s.version) for s in turn.version_spans] for turn in sample.turns]
        await turns(spins)
        await run.sync(step)
    await run.producer.close()
    return found


async def test_turns_are_repeated_as_they_were_interrupted(tmp_path: Path) -> None:
    """At another speed: tools of the first run take very different times, those of the second none."""
    first = Run(log=AdmissionLog(tmp_path))

    async def slow(rollout: str, turn: int) -> list[int]:
        await turns(5 * (int(rollout.partition("@")[0]) * 7 % 11))
        return [100 + turn]

    first.talk.tool = slow
    expected = await spans_of(first, spins=25)
    file = tmp_path / "admissions.jsonl"
    of_samples = [[tuple(version for *_, version in turn) for turn in of_turns] for of_turns in expected.values()]
    assert any(len(versions) > 1 for of_turns in of_samples for versions in of_turns), "a sync within a turn"
    assert any(before[-1] < after[0] for of_turns in of_samples for before, after in pairwise(of_turns)), (
        "a sync between turns"
    )
    assert await spans_of(Run(replay=Replay(file)), spins=0) == expected
    assert any(len(spans) > 1 for of_sample in expected.values() for spans in of_sample)

    further = {"sample": "5@0#0", "request": f"5@0#0/{TURNS}", "ends": [[0, 1], [1, 2]]}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    [sync] = [line for line in lines if line.get("step") == 1]
    sync["unfinished"] = sorted({*sync["unfinished"], "5@0#0"})
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in [*lines, further]))
    with pytest.raises(ConfigError, match=r"has sample '5@0#0' unfinished at the weight sync of step 1, but this run"):
        await spans_of(Run(replay=Replay(other)), spins=0)


async def test_the_tokens_of_an_interrupted_request_are_told_again_when_it_goes_on() -> None:
    fleet, told = Fleet(), list[tuple[int, list[int]]]()
    record = SimpleNamespace(backend=SimpleNamespace(record=FAKE_GENERATOR), origin=Origin("fake", "role generator"))
    roles: Any = {"generator": record}
    runtime: Any = SimpleNamespace(generator=lambda role: fleet, data=PlainData())
    source = InterruptibleCompletions(Rollouts(runtime, RolloutConfig(), roles), ["generator"], "abort")
    prompt = Prompt("0", np.array([1]), "?")
    wanted = GenerateRequest("r/0", prompt.token_ids, SamplingParams(TOKENS), "r")
    asking = RolloutRequest("r", ExampleDraw(prompt, 0, "0"), wanted, on_tokens=lambda *some: told.append(some))
    task = asyncio.create_task(source.completion("generator", asking))
    while len(told) < 3:
        await asyncio.sleep(0)
    await source.interrupt(lambda: ["r"])
    await source.resume()
    ids = (await task).token_ids.tolist()
    again = next(index for index, (start, _) in enumerate(told) if index and start == 0)
    assert [start for start, _ in told[:again]] == list(range(again))
    prior = told[again][1]
    assert prior == ids[: len(prior)]
    assert len(prior) >= again >= 3
    assert [one for _, some in told[again:] for one in some] == ids
