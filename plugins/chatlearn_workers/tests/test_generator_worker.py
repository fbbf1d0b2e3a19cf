"""What a generator's worker reports, with a generator that a test drives."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from chatlearn_core.protocols import OnTokens
from chatlearn_core.types import Completion, GenerateRequest, SamplingParams
from chatlearn_workers import generator_worker
from chatlearn_workers.generator_worker import GeneratorWorker


class Streaming:
    """Samples two tokens, then waits."""

    state, policy_version = "serving", 4

    def __init__(self) -> None:
        self.on_tokens: dict[str, OnTokens | None] = {}

    def health(self) -> str:
        return "it is slow"

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        self.on_tokens[request.id] = on_tokens
        if on_tokens is not None:
            on_tokens(0, [7])
            on_tokens(1, [8])
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def worker() -> GeneratorWorker:
    """Without plugins: ``Worker.__init__`` looks for them."""
    made = GeneratorWorker.__new__(GeneratorWorker)
    made._generator = Streaming()  # type: ignore[assignment]  # the part that is used
    made._running, made._ended, made._tokens = set(), [], {}
    made._news = asyncio.Event()
    return made


async def test_tokens_of_streamed_requests_are_in_the_next_report(
    worker: GeneratorWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_worker, "PROGRESS_S", 0.01)
    requests = [GenerateRequest(name, np.array([1]), SamplingParams(4)) for name in "ab"]
    await worker.submit(list(enumerate(requests)), frozenset({1}))
    report, _ = await asyncio.wait_for(worker.collect(), 30)
    assert report.tokens == ((1, 0, [7, 8]),)
    assert (report.policy_version, report.problem, report.results) == (4, "it is slow", ())
    generator: Any = worker.generator
    assert generator.on_tokens["a"] is None
    assert (await worker.status()).tokens == ()
    for task in list(worker._running):
        task.cancel()
