"""Fleets without an engine, whose requests end when a test says so, or after so many tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import OnTokens
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    FinishReason,
    GenerateRequest,
    Prompt,
    SamplingParams,
    VersionSpan,
)


class Requests:
    """Makes requests, and completions of them whose values tell their place."""

    def make(self, name: str, *, group: str = "", tokens: int = 8, prompt: int = 3) -> GenerateRequest:
        return GenerateRequest(name, np.arange(1, prompt + 1), SamplingParams(tokens), group)

    def complete(
        self, request: GenerateRequest, length: int | None = None, reason: FinishReason = "stop", version: int = 0
    ) -> Completion:
        """What is resumed, then new tokens up to ``length``: token t is t, its logprob -version - t/1000."""
        prior = request.resume_from
        start = 0 if prior is None else len(prior.token_ids)
        stop = request.sampling.max_tokens if length is None else length
        spans = [] if prior is None else list(prior.version_spans)
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, stop, version)
        elif stop > start:
            spans.append(VersionSpan(start, stop, version))
        before = np.zeros(0, np.float32) if prior is None else prior.logprobs
        after = -version - np.arange(start, stop) / 1000
        return Completion(
            request_id=request.id,
            token_ids=np.arange(stop),
            logprobs=np.concatenate([before, after]).astype(np.float32),
            basis=request.sampling.basis,
            finish_reason=reason,
            sampling=request.sampling,
            version_spans=tuple(spans),
        )


class HeldFleet:
    """Writes down what reaches it; a request waits until ``end`` gives it its outcome."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.accepting = frozenset(range(num_replicas))
        self.started: list[tuple[int, str]] = []
        """(replica, request) in the order in which they came."""
        self.calls: list[str] = []
        self.requests: dict[str, GenerateRequest] = {}
        self._waiting: dict[str, asyncio.Future[Completion]] = {}

    async def generate(
        self, request: GenerateRequest, replica: int | None = None, on_tokens: OnTokens | None = None
    ) -> Completion:
        assert replica is not None, "the manager chooses"
        self.on_tokens = on_tokens
        self.started.append((replica, request.id))
        self.requests[request.id] = request
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            return await future
        finally:
            del self._waiting[request.id]

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self.calls.append(f"abort {request_ids}")

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    @property
    def open(self) -> list[str]:
        """Requests that wait here."""
        return list(self._waiting)

    def on(self, replica: int) -> list[str]:
        """Requests that reached a replica."""
        return [name for index, name in self.started if index == replica]

    async def end(self, name: str, outcome: Completion | Exception | None = None) -> None:
        """Give a request its outcome (by default all its tokens), and wait until nothing moves any more."""
        await self.settled()
        if isinstance(outcome, Exception):
            self._waiting[name].set_exception(outcome)
        else:
            self._waiting[name].set_result(outcome or Requests().complete(self.requests[name]))
        await self.settled()

    async def settled(self) -> None:
        for _ in range(25):
            await asyncio.sleep(0)


@pytest.fixture(scope="session")
def requests() -> Requests:
    return Requests()


@pytest.fixture
def held_fleet() -> type[HeldFleet]:
    return HeldFleet


class ScriptedEngine:
    """Samples as many tokens as ``lengths`` says of each request (cut off at its bound), under ``version``."""

    def __init__(self, lengths: dict[str, int], failing: Collection[str] = ()) -> None:
        self.lengths = lengths
        self.failing = set(failing)
        self.version = 0
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        if request.id in self.failing:
            raise BackendError(f"{request.id} failed")
        whole, bound = self.lengths.get(request.id, 1), request.sampling.max_tokens
        reason: FinishReason = "stop" if whole <= bound else "length"
        return Requests().complete(request, min(whole, bound), reason, self.version)


@pytest.fixture(scope="session")
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


class Play:
    """Steps of partial rollouts without a flow: what would be trained, and what is pending."""

    def __init__(self, partial: Any, max_tokens: int, group_size: int = 2) -> None:
        self.partial = partial
        self.max_tokens = max_tokens
        self.group_size = group_size
        self.pending: tuple[Group, ...] = ()
        self.metrics: dict[str, float] = {}

    def requests(self, prompt: Prompt, step: int) -> list[RolloutRequest]:
        return self.requests_of(ExampleDraw(prompt, step, f"{prompt.id}@{step}"))

    def requests_of(self, draw: ExampleDraw) -> list[RolloutRequest]:
        return make_requests([draw], self.group_size, SamplingParams(self.max_tokens), seed=0)

    async def step(self, step: int, prompts: Sequence[Prompt]) -> dict[str, Completion | BackendError]:
        """By sample id, those that the step trains or excludes."""
        new = [request for prompt in prompts for request in self.requests(prompt, step)]
        rollout_step = self.partial.begin(self.pending, new)
        playing = asyncio.create_task(self.partial.play(rollout_step))
        answers = await asyncio.gather(
            *(rollout_step.completion("generator", request) for request in rollout_step.requests),
            return_exceptions=True,
        )
        await playing
        ended: dict[str, Completion | BackendError] = {}
        for request, answer in zip(rollout_step.requests, answers, strict=True):
            if isinstance(answer, BaseException) and (
                isinstance(answer, ReplicaLostError) or not isinstance(answer, BackendError)
            ):
                raise answer
            if answer is not None:
                ended[request.sample_id] = answer
        self.pending, metrics = await self.partial.finish(rollout_step)
        self.metrics = {name: metric.value for name, metric in metrics.items()}
        return ended


@pytest.fixture(scope="session")
def play() -> type[Play]:
    return Play


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return [Prompt(f"p{i}", np.array([1, 2, 3]), "?") for i in range(60)]
