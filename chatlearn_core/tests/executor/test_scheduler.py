"""The scheduler streams: calls start when what they need is there, and the result does not depend on when that was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ContractError,
    PluginError,
    ReplicaLostError,
    WeightSyncError,
)
from chatlearn_core.executor.colocation import ColocationManager
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.flow import trace
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Device, PlainData
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    ExampleDraw,
    GenerateRequest,
    OutputRequest,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
)
from chatlearn_testing.fakes.fleet_completions import FleetCompletions

ROLES = {"generator": "generator", "reward": "reward", "judge": "reward", "trainer": "trainer", "reference": "trainer"}


def grpo(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples), m.reference.logprobs(samples), m.trainer.logprobs(samples))


def generate_and_score(prompts: Any, m: Any) -> Any:
    samples = m.generator.generate(prompts)
    return m.join(samples, m.reward.score(samples))


class ScriptedRuntime:
    """Every request waits until the test lets it finish; every call is written down."""

    def __init__(self) -> None:
        self.data = PlainData()
        self.events: list[str] = []
        self.open: dict[str, asyncio.Future[None]] = {}
        self.failures: dict[str, Exception] = {}
        self.empty: set[str] = set()
        self.reward_waits: asyncio.Event | None = None
        self.compute_error: Exception | None = None
        self.batches: list[tuple[str, TrainBatch, OutputRequest]] = []

    def generator(self, role: str) -> Any:
        return self

    def reward(self, role: str) -> Any:
        return self

    def trainer(self, role: str) -> Any:
        runtime = self

        class Group:
            async def compute(self, batch: TrainBatch, request: OutputRequest) -> Any:
                return await runtime.compute(role, batch, request)

        return Group()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.events.append(f"generate {request.id}")
        self.open[request.id] = asyncio.get_running_loop().create_future()
        await self.open[request.id]
        if request.id in self.failures:
            raise self.failures[request.id]
        length = 0 if request.id in self.empty else 2
        self.events.append(f"done {request.id}")
        return Completion(
            request.id,
            np.arange(length),
            np.full(length, -1.0, np.float32),
            RAW_BASIS,
            "stop",
            request.sampling,
            (),
        )

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        self.events.append("score " + " ".join(sample.id for sample in samples))
        if self.reward_waits is not None:
            await self.reward_waits.wait()
        return [RewardResult(float(sample.id[-1])) for sample in samples]

    async def compute(self, role: str, batch: TrainBatch, request: OutputRequest) -> Any:
        self.events.append(f"compute {role}")
        if self.compute_error is not None:
            raise self.compute_error
        self.batches.append((role, batch, request))
        [output] = request.names
        return {output: torch.arange(batch.num_tokens) * (-10.0 if role == "trainer" else -1.0)}

    async def finish(self, *ids: str) -> None:
        """Let these requests finish, one after the other, and wait until nothing moves any more."""
        for sample_id in ids:
            await settled()
            self.open[sample_id].set_result(None)
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def make_requests(groups: int = 2, size: int = 2) -> list[RolloutRequest]:
    requests = []
    for group in range(groups):
        prompt = Prompt(f"p{group}", np.array([1, 2, 3]), "?")
        for index in range(size):
            sample_id = f"p{group}@1#{group * size + index}"
            request = GenerateRequest(sample_id, prompt.token_ids, SamplingParams(4), f"p{group}@1")
            requests.append(RolloutRequest(sample_id, ExampleDraw(prompt, 1, f"p{group}@1"), request))
    return requests


def ids_of(requests: list[RolloutRequest]) -> list[str]:
    return [request.sample_id for request in requests]


def scheduler_for(flow: Any, runtime: ScriptedRuntime, **settings: Any) -> FlowScheduler:
    hosted: Any = runtime  # the part that is used
    front = settings.pop("front", None) or FleetCompletions(hosted)
    return FlowScheduler(trace(flow, ROLES), hosted, front, **settings)


async def test_all_requests_are_submitted_in_order_before_any_finishes() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await settled()
    assert runtime.events == [f"generate {sample_id}" for sample_id in ids_of(requests)]
    await runtime.finish(*ids_of(requests))
    await run


async def test_rewards_start_while_generation_goes_on() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(c)
    assert runtime.events[-1] == f"score {c}", "three others are still being generated"
    await runtime.finish(a)
    assert runtime.events[-1] == f"score {a}"
    assert "compute trainer" not in runtime.events, "a trainer call waits for the whole batch"
    await runtime.finish(b, d)
    await run
    assert {"compute trainer", "compute reference"} <= set(runtime.events)


async def test_a_slow_reward_holds_up_neither_generation_nor_the_next_reward() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    runtime.reward_waits = asyncio.Event()
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await runtime.finish(a, b)
    assert [event for event in runtime.events if event.startswith("score")] == [f"score {a}", f"score {b}"]
    await runtime.finish(c, d)
    assert not run.done()
    runtime.reward_waits.set()
    await run


async def test_what_is_ready_together_is_scored_together_in_slot_order() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await settled()
    for sample_id in reversed(ids_of(requests)):
        runtime.open[sample_id].set_result(None)
    await run
    assert [event for event in runtime.events if event.startswith("score")] == ["score " + " ".join(ids_of(requests))]


@pytest.mark.parametrize("seed", range(5))
async def test_results_are_in_slot_order_whatever_the_timing(seed: int) -> None:
    runtime, requests = ScriptedRuntime(), make_requests(groups=3, size=3)
    order = ids_of(requests)
    random.Random(seed).shuffle(order)
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(*order)
    samples = await run
    assert [sample.id for sample in samples] == ids_of(requests)
    assert [sample.reward.value for sample in samples if sample.reward] == [float(i) for i in range(9)]
    for index, sample in enumerate(samples):
        start = index * 5
        assert sample.token_data["reference_logprobs"].tolist() == [-float(start + t) for t in range(5)]
        assert sample.token_data["trainer_logprobs"].tolist() == [-10.0 * (start + t) for t in range(5)]


async def test_a_group_reward_waits_for_the_whole_group() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    scheduler = scheduler_for(generate_and_score, runtime, group_rewards=frozenset({"reward"}))
    run = asyncio.create_task(scheduler.run(requests, Timers()))
    await runtime.finish(d, b)
    assert not [event for event in runtime.events if event.startswith("score")]
    await runtime.finish(c)
    assert runtime.events[-1] == f"score {c} {d}", "the group is complete, in request order"
    await runtime.finish(a)
    assert runtime.events[-1] == f"score {a} {b}"
    await run


async def test_a_failed_generation_excludes_its_sample_with_the_reason() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    runtime.failures[b] = BackendError("the prompt does not fit")
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(a, b, c, d)
    samples = await run
    assert [sample.exclusion for sample in samples] == [None, "generation failed: the prompt does not fit", None, None]
    assert not samples[1].turns
    assert samples[1].reward is None
    assert not samples[1].loss_mask.any()
    assert not any(b in event for event in runtime.events if event.startswith("score")), "there is nothing to judge"
    for _, batch, _ in runtime.batches:
        assert batch.sample_ids == (a, c, d), "and nothing to compute on"


async def test_a_timeout_is_counted_apart_from_failures() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    runtime.failures[ids_of(requests)[0]] = BackendTimeoutError("nothing in 3 s")
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    assert (await run)[0].exclusion == "generation timed out: nothing in 3 s"


async def test_a_group_that_its_source_leaves_out_is_not_called_for_any_more() -> None:
    class Source:
        async def completion(self, role: str, request: RolloutRequest) -> Completion | None:
            assert role == "generator"
            if request.group_id == "p0@1":
                return None
            assert request.generate_request is not None
            return await runtime.generate(request.generate_request)

    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    scheduler = scheduler_for(grpo, runtime, group_rewards=frozenset({"reward"}))
    run = asyncio.create_task(scheduler.run(requests, Timers(), Source()))
    await runtime.finish(c, d)
    assert [sample.id for sample in await run] == [c, d]
    assert [request.left_out for request in requests] == [True, True, False, False]
    assert not any(name in event for name in (a, b) for event in runtime.events)
    assert {batch.sample_ids for _, batch, _ in runtime.batches} == {(c, d)}


async def test_calls_on_generators_go_through_the_front() -> None:
    calls: list[str] = []

    class Front:
        def begin(self) -> None:
            calls.append("begin")

        async def completion(self, role: str, request: RolloutRequest) -> Completion:
            calls.append(f"{role} {request.sample_id}")
            assert request.generate_request is not None
            return await runtime.generate(request.generate_request)

    runtime, requests = ScriptedRuntime(), make_requests(groups=1)
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime, front=Front()).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    await run
    assert calls == ["begin", "generator p0@1#0", "generator p0@1#1"]


async def test_a_group_with_a_failed_generation_is_still_scored() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    a, b, c, d = ids_of(requests)
    runtime.failures[b] = BackendError("lost")
    scheduler = scheduler_for(generate_and_score, runtime, group_rewards=frozenset({"reward"}))
    run = asyncio.create_task(scheduler.run(requests, Timers()))
    await runtime.finish(a, b)
    assert runtime.events[-1] == f"score {a}"
    await runtime.finish(c, d)
    await run


async def test_a_completion_of_another_basis_than_declared_ends_the_run() -> None:
    runtime, requests = ScriptedRuntime(), make_requests(1, 2)
    for request in requests:
        assert request.generate_request is not None
        request.generate_request = replace(request.generate_request, sampling=SamplingParams(4, temperature=0.7))
    bases = {"generator": DeclaredBases("generator", "acme", frozenset({"processed"}))}
    scheduler = scheduler_for(lambda prompts, m: m.generator.generate(prompts), runtime, bases=bases)
    run = asyncio.create_task(scheduler.run(requests, Timers()))
    await settled()
    await runtime.finish(requests[0].sample_id)
    with pytest.raises(PluginError, match="returned logprobs of basis raw for request p0@1#0"):
        await run


async def test_a_completion_with_data_that_a_call_of_the_flow_writes_ends_the_run() -> None:
    class Writing(ScriptedRuntime):
        async def generate(self, request: GenerateRequest) -> Completion:
            return replace(await super().generate(request), token_data={"trainer_logprobs": np.zeros(2, np.float32)})

    runtime, requests = Writing(), make_requests(1, 1)
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(requests[0].sample_id)
    with pytest.raises(ContractError, match="sample 'p0@1#0' has the token data 'trainer_logprobs', which a call of"):
        await run


async def test_an_empty_completion_is_excluded() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    runtime.empty.add(requests[0].sample_id)
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    samples = await run
    assert samples[0].exclusion == "empty_completion"
    assert samples[1].exclusion is None


async def test_a_completion_that_was_aborted_is_not_trained_on() -> None:
    class Aborting(ScriptedRuntime):
        async def generate(self, request: GenerateRequest) -> Completion:
            completion = await super().generate(request)
            return replace(completion, finish_reason="abort") if request.id == requests[1].sample_id else completion

    runtime, requests = Aborting(), make_requests()
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    samples = await run
    assert samples[1].exclusion == "generation failed: aborted after 2 tokens, unasked"
    assert not samples[1].loss_mask.any()
    assert [sample.exclusion for sample in samples if sample is not samples[1]] == [None] * 3


async def test_outputs_that_are_not_finite_end_the_step_by_role_and_sample() -> None:
    class Broken(ScriptedRuntime):
        async def compute(self, role: str, batch: TrainBatch, request: OutputRequest) -> Any:
            return {name: values * torch.nan for name, values in (await super().compute(role, batch, request)).items()}

    runtime, requests = Broken(), make_requests()
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    with pytest.raises(ContractError, match=r"role '.*', a trainer: compute returned 'logprobs' = nan for sample 'p0"):
        await run


async def test_a_runtime_that_loses_a_verdict_fails_the_rewards_it_was_asked_for() -> None:
    class Losing(ScriptedRuntime):
        async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
            return (await super().score(samples))[1:]

    runtime, requests = Losing(), make_requests(1)
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    assert {sample.exclusion for sample in await run} == {"reward failed: returned 0 results for 1 samples"}


async def test_a_failed_reward_excludes_its_sample_with_the_reason() -> None:
    class Failing(ScriptedRuntime):
        async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
            return [RewardResult(None, error="math: KeyError: 'answer'") for _ in samples]

    runtime, requests = Failing(), make_requests()
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    assert {sample.exclusion for sample in await run} == {"reward failed: math: KeyError: 'answer'"}


async def test_if_every_generation_fails_the_run_is_told_the_first_reason() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    runtime.failures = {sample_id: BackendError(f"no memory for {sample_id}") for sample_id in ids_of(requests)}
    run = asyncio.create_task(scheduler_for(generate_and_score, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    with pytest.raises(
        BackendError, match=r"every one of 4 generations failed, the first with: .* no memory for p0@1#0"
    ):
        await run


async def test_a_lost_generator_stops_the_step_and_nothing_is_left_running() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    runtime.failures[requests[2].sample_id] = ReplicaLostError("replica 0 died")
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(requests[2].sample_id)
    with pytest.raises(ReplicaLostError, match="replica 0 died"):
        await run
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_failing_trainer_is_raised_as_itself() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    runtime.compute_error = BackendError("role 'trainer': compute failed: CUDA out of memory")
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await runtime.finish(*ids_of(requests))
    with pytest.raises(BackendError, match="CUDA out of memory") as caught:
        await run
    assert isinstance(caught.value.__cause__, ExceptionGroup), "others that failed at the same time are kept"


@pytest.mark.parametrize(("serious", "other"), [(ReplicaLostError("a"), WeightSyncError("b"))])
async def test_of_several_errors_the_most_serious_is_raised(serious: Exception, other: Exception) -> None:
    from chatlearn_core.executor.scheduler import _first

    group: ExceptionGroup[Exception] = ExceptionGroup("", [RuntimeError("c"), ExceptionGroup("", [other, serious])])
    assert _first(group) is serious
    assert _first(ExceptionGroup("", [RuntimeError("c"), other])) is other


async def test_trainer_outputs_are_asked_at_the_sampling_temperature() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    run = asyncio.create_task(
        scheduler_for(grpo, runtime, sampling=SamplingParams(4, temperature=0.7)).run(requests, Timers())
    )
    await runtime.finish(*ids_of(requests))
    await run
    assert {request.temperature for _, _, request in runtime.batches} == {0.7}
    greedy = scheduler_for(grpo, runtime, sampling=SamplingParams(4, temperature=0.0))
    run = asyncio.create_task(greedy.run(make_requests(1, 1), Timers()))
    await runtime.finish("p0@1#0")
    await run
    assert runtime.batches[-1][2].temperature == 1.0, "greedy: the model's own distribution"


async def test_stopping_cancels_every_call() -> None:
    runtime, requests = ScriptedRuntime(), make_requests()
    run = asyncio.create_task(scheduler_for(grpo, runtime).run(requests, Timers()))
    await settled()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_sequence_outputs_go_to_the_sample() -> None:
    def scored(demonstrations: Any, m: Any) -> Any:
        samples = m.generator.generate(demonstrations)
        return m.join(samples, m.reward_model.scores(samples))

    class Scoring(ScriptedRuntime):
        async def compute(self, role: str, batch: TrainBatch, request: OutputRequest) -> Any:
            return {"scores": torch.arange(batch.num_sequences) / 2}

    runtime, requests = Scoring(), make_requests()
    graph = trace(scored, ROLES | {"reward_model": "trainer"})
    run = asyncio.create_task(FlowScheduler(graph, runtime, FleetCompletions(runtime)).run(requests, Timers()))  # type: ignore[arg-type]  # as above
    await runtime.finish(*ids_of(requests))
    assert [sample.sequence_data["reward_model_scores"] for sample in await run] == [0.0, 0.5, 1.0, 1.5]


GPU0, GPU1 = Device("GPU 0", is_gpu=True), Device("GPU 1", is_gpu=True)


class PlacedRuntime(ScriptedRuntime):
    """Roles on devices; who is inside a trainer call is written down."""

    def __init__(self, **places: Device) -> None:
        super().__init__()
        self.places = places
        self.moved: list[str] = []
        self.inside: set[str] = set()
        self.meeting: asyncio.Barrier | None = None
        """Where trainer calls wait for each other."""

    def devices(self) -> dict[str, frozenset[Device]]:
        return {role: frozenset({device}) for role, device in self.places.items()}

    def trainer(self, role: str) -> Any:
        return PlacedGroup(self, role)

    def generator(self, role: str) -> Any:
        return PlacedGroup(self, role)

    async def compute(self, role: str, batch: TrainBatch, request: OutputRequest) -> Any:
        self.inside.add(role)
        shared = [other for other in self.inside - {role} if self.places[other] == self.places[role]]
        assert not shared, f"{role} computes while {shared} do on the same device"
        if self.meeting is not None:
            await self.meeting.wait()
        await settled()
        self.inside.remove(role)
        return await super().compute(role, batch, request)

    @property
    def colocation(self) -> ColocationManager:
        roles: Any = {
            name: SimpleNamespace(name=name, kind=ROLES[name], trainable=False, holds_a_model=ROLES[name] != "reward")
            for name in self.places
        }
        return ColocationManager(self, roles, "auto")  # type: ignore[arg-type]  # the part that is used


class PlacedGroup:
    def __init__(self, runtime: PlacedRuntime, role: str) -> None:
        self.runtime = runtime
        self.role = role
        self.generate = runtime.generate

    async def compute(self, batch: TrainBatch, request: OutputRequest) -> Any:
        return await self.runtime.compute(self.role, batch, request)

    async def offload(self, parts: Sequence[str]) -> list[Any]:
        self.runtime.events.append(f"offload {self.role}")
        return []

    async def onload(self, parts: Sequence[str]) -> list[Any]:
        self.runtime.events.append(f"onload {self.role}")
        return []


def overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["start_s"] < other["stop_s"] and other["start_s"] < one["stop_s"])


def spans(timers: Timers) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(entry["role"], entry["action"]): entry for entry in timers.trace() if "calls" in entry}


async def test_calls_of_one_level_on_different_devices_run_at_the_same_time() -> None:
    """Reference and trainer each wait inside until the other is there too; the reward judges meanwhile."""
    runtime, requests, timers = PlacedRuntime(generator=GPU0, trainer=GPU0, reference=GPU1), make_requests(), Timers()
    runtime.meeting, runtime.reward_waits = asyncio.Barrier(3), asyncio.Event()
    run = asyncio.create_task(scheduler_for(grpo, runtime, colocation=runtime.colocation).run(requests, timers))
    await runtime.finish(*ids_of(requests))
    async with asyncio.timeout(5):
        while runtime.meeting.n_waiting < 2:
            await asyncio.sleep(0)
        assert runtime.inside == {"reference", "trainer"}
        await runtime.meeting.wait()
        runtime.reward_waits.set()
        await run
    entries = spans(timers)
    calls = [entries["reference", "logprobs"], entries["trainer", "logprobs"], entries["reward", "score"]]
    assert all(overlap(one, other) for one in calls for other in calls)
    assert {entry["level"] for entry in calls} == {1}


async def test_calls_that_share_a_device_follow_one_another_in_the_order_of_the_flow() -> None:
    runtime, requests, timers = PlacedRuntime(generator=GPU0, trainer=GPU0, reference=GPU0), make_requests(), Timers()
    run = asyncio.create_task(scheduler_for(grpo, runtime, colocation=runtime.colocation).run(requests, timers))
    await runtime.finish(*ids_of(requests))
    await run
    order = [event for event in runtime.events if not event.startswith(("generate", "done", "score"))]
    assert order == [
        "offload trainer",
        "offload reference",
        "offload generator",
        "onload reference",
        "compute reference",
        "offload reference",
        "onload trainer",
        "compute trainer",
    ]
    entries = spans(timers)
    assert not overlap(entries["reference", "logprobs"], entries["trainer", "logprobs"])


async def test_beside_a_shared_generator_rewards_stream_and_trainers_wait_for_the_last_completion() -> None:
    runtime, requests = PlacedRuntime(generator=GPU0, trainer=GPU0, reference=GPU1), make_requests()
    a, b, c, d = ids_of(requests)
    run = asyncio.create_task(scheduler_for(grpo, runtime, colocation=runtime.colocation).run(requests, Timers()))
    await runtime.finish(a, b, c)
    assert runtime.events[-1] == f"score {c}"
    assert "offload generator" not in runtime.events
    await runtime.finish(d)
    await run
    assert runtime.events.index("offload generator") > runtime.events.index(f"done {d}")
    assert runtime.events.index("compute trainer") > runtime.events.index("onload trainer")
