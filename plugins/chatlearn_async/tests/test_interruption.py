from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_core.types import GenerateRequest, SamplingParams


class Hanging:
    """A rollout manager whose requests end by cancellation alone, some turns of the loop later."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    def of(self, role: str) -> Any:
        return SimpleNamespace(generate=self.generate)

    async def generate(self, request: GenerateRequest, on_tokens: Any = None) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            self.num_cancelled += 1


async def test_requests_of_rollouts_that_have_not_ended_yet_end_with_it() -> None:
    """An environment may hold a request in a task of its own, which outlives the cancelled rollout for a moment."""
    rollouts = Hanging()
    source = InterruptibleCompletions(rollouts, ["generator"], "abort")  # type: ignore[arg-type]  # the part it uses
    asked = [GenerateRequest(name, np.arange(3), SamplingParams(4, seed=1), name) for name in ("a", "b")]
    requests = [SimpleNamespace(sample_id=one.id, generate_request=one, on_tokens=None) for one in asked]
    open_calls = [
        asyncio.ensure_future(source.completion("generator", request))  # type: ignore[arg-type]  # as above
        for request in requests
    ]
    for _ in range(3):
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await source.close()
    assert rollouts.num_cancelled == 2
    for call in open_calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    await source.close()
