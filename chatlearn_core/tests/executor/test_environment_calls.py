"""What a flow's call on an environment makes of its rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ContractError
from chatlearn_core.executor.environment_calls import rollout
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.plugins.records import EnvironmentSpec
from chatlearn_core.protocols import GenerateFor, PlainData, RolloutContext, RolloutOrder
from chatlearn_core.types import (
    Completion,
    ExampleDraw,
    GenerateRequest,
    Prompt,
    RewardResult,
    Rollout,
    SamplingParams,
    VersionSpan,
)


def completion(request: GenerateRequest, *token_ids: int) -> Completion:
    count = len(token_ids)
    spans = (VersionSpan(0, count, 0),)
    zeros, sampling = np.zeros(count, np.float32), request.sampling
    return Completion(request.id, np.array(token_ids), zeros, sampling.basis, "stop", sampling, spans)


class Source:
    turns_together = True

    async def completion(self, role: str, request: Any) -> Completion:
        return completion(request.generate_request, 7, 8)


class Rewarding:
    """Two sequences: one with rewards of its turns, one with a reward of its own."""

    async def rollout(self, order: RolloutOrder, generate: GenerateFor) -> Rollout:
        context = RolloutContext(order, None, generate)
        first, second, third = context.sequence(), context.sequence("/b"), context.sequence("/c")
        with pytest.raises(ContractError, match=r"sample 'p@0#0' cannot be rewarded by 1.0: nothing was sampled yet"):
            first.rewarded(1.0)
        for turn in range(3):
            if turn:
                first.observed([5])
            first.sampled(await context.generate(first.token_ids))
            if turn != 1:
                first.rewarded(0.25 + turn)
        first.rewarded(-1.0)
        with pytest.raises(ContractError, match=r"cannot be rewarded by nan: a reward must be finite"):
            first.rewarded(float("nan"))
        for sequence in (second, third):
            sequence.sampled(await context.generate(sequence.token_ids))
        second.sample.reward = RewardResult(9.0)
        return context.finished([first, second, third], reward=RewardResult(2.0, {"won": 1.0}))


async def test_rewards_of_turns_and_sequences_stand_beside_the_rollouts() -> None:
    [request] = make_requests([ExampleDraw(Prompt("p", np.array([1, 2]), "?"), 0, "p@0")], 1, SamplingParams(4), seed=0)
    environment = Rewarding()
    role = SimpleNamespace(
        name="game",
        kind="environment",
        backend=SimpleNamespace(record=EnvironmentSpec(name="game", factory="fake:Game", options="fake:Options")),
        uses={"policy": "generator"},
        timeout_s=30.0,
        max_turns=None,
    )
    call: Any = SimpleNamespace(
        plan=SimpleNamespace(roles={"game": role}),
        node=SimpleNamespace(arguments={}, role="game"),
        max_length=64,
        source=Source(),
        runtime=SimpleNamespace(data=PlainData(), environment=lambda name: environment),
    )
    await rollout(call, [request])
    first, second, third = request.samples
    assert first.token_ids.tolist() == [1, 2, 7, 8, 5, 7, 8, 5, 7, 8]
    assert first.reward is not None
    assert (first.reward.value, first.reward.components) == (2.0, {"won": 1.0})
    assert first.reward.step_ends is not None
    assert first.reward.token_values is not None
    assert first.reward.step_ends.tolist() == [1, 7]
    assert first.reward.token_values.tolist() == [0, 0.25, 0, 0, 0, 0, 0, 1.25]
    assert second.reward == RewardResult(9.0)
    assert third.reward == RewardResult(2.0, {"won": 1.0})
