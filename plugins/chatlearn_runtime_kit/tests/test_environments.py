"""An environment's rollouts have at most as many turns as their order allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ContractError, TurnLimitError
from chatlearn_core.executor.environment_calls import rollout
from chatlearn_core.executor.rollout_producer import make_requests
from chatlearn_core.executor.sample_metrics import exclusion_metrics
from chatlearn_core.plugins.records import EnvironmentSpec
from chatlearn_core.protocols import OnTokens, PlainData, RolloutContext, RolloutOrder
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
from chatlearn_runtime_kit.environments import EnvironmentRole, LocalEnvironments, checked_rollout

PROMPT = Prompt("p", np.array([1, 2]), "?")
ROLE = EnvironmentRole("game", "games", ("policy", "user"), "policy", timeout_s=30.0)


class Talk:
    """Plays three turns, each after a question of a simulated user."""

    def __init__(self, *, looks: bool) -> None:
        self.looks = looks

    def setup(self) -> None: ...

    def close(self) -> None: ...

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        sequence = context.sequence()
        for _ in range(3):
            if self.looks and context.turns_left == 0:
                return context.finished([sequence], status="truncated")
            sequence.sampled(await context.generate(sequence.token_ids))
            question = await context.generate(sequence.token_ids, role="user")
            sequence.observed(question.token_ids)
        return context.finished([sequence])


async def generate(handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /) -> Completion:
    """One token for each request."""
    spans = (VersionSpan(0, 1, 0),)
    zeros = np.zeros(1, np.float32)
    return Completion(request.id, np.array([7]), zeros, request.sampling.basis, "stop", request.sampling, spans)


@pytest.fixture
async def play() -> AsyncIterator[Any]:
    """``await play(max_turns, looks=...)``: one rollout."""
    made: list[LocalEnvironments] = []

    async def played(max_turns: int | None, *, looks: bool) -> Rollout:
        made.append(LocalEnvironments(ROLE, Talk(looks=looks), tokenizer=None))
        await made[-1].start()
        order = RolloutOrder("p@0#0", "p@0", PROMPT, SamplingParams(4), 0, 64, 30.0, max_turns)
        return await made[-1].rollout(order, generate)

    yield played
    for one in made:
        one.close()


@pytest.mark.parametrize("max_turns", [None, 3])
async def test_a_rollout_within_its_limit_is_not_cut(play: Any, max_turns: int | None) -> None:
    found = await play(max_turns, looks=True)
    assert (found.status, len(found.samples[0].turns)) == ("finished", 3)


async def test_an_environment_sees_the_limit_and_ends_the_rollout_there(play: Any) -> None:
    found = await play(2, looks=True)
    assert (found.status, len(found.samples[0].turns)) == ("truncated", 2), "what the user says is no turn"
    assert found.samples[0].loss_mask.tolist() == [False, False, True, False, True, False]


async def test_a_turn_too_many_is_refused_by_rollout_and_limit(play: Any) -> None:
    with pytest.raises(TurnLimitError, match=r"rollout p@0#0 asked for turn 3, but may have 2 \(max_turns"):
        await play(2, looks=False)


async def test_a_rollout_with_too_many_turns_is_excluded_and_counted_by_that_reason() -> None:
    environments = LocalEnvironments(ROLE, Talk(looks=False), tokenizer=None)
    await environments.start()
    requests = make_requests([ExampleDraw(PROMPT, 0, "p@0")], 2, SamplingParams(4), seed=0)
    call: Any = _call(environments)
    await rollout(call, requests)
    environments.close()
    samples = [request.filled for request in requests]
    assert not any(sample.turns for sample in samples)
    assert exclusion_metrics(samples)["samples/excluded/turn_limit_exceeded"].value == 2


def _call(environments: LocalEnvironments) -> Any:
    """A flow's call on an environment whose role may have two turns."""

    class Source:
        turns_together = True

        async def completion(self, role: str, request: Any) -> Completion:
            return await generate(role, request.generate_request)

    uses = {"policy": "generator", "user": "speaker"}
    record = EnvironmentSpec(name="game", factory="fake:Game", options="fake:Options", uses=("policy", "user"))
    role = SimpleNamespace(
        name="game",
        kind="environment",
        backend=SimpleNamespace(record=record),
        uses=uses,
        timeout_s=30.0,
        max_turns=2,
    )
    return SimpleNamespace(
        plan=SimpleNamespace(roles={"game": role}),
        node=SimpleNamespace(arguments={}, role="game"),
        max_length=64,
        source=Source(),
        runtime=SimpleNamespace(data=PlainData(), environment=lambda name: environments),
    )


ORDER = RolloutOrder("p@0#0", "p@0", PROMPT, SamplingParams(8), seed=0, max_tokens=8, timeout_s=1.0)


def made(reward: Any = None, status: Any = "finished", **changes: Any) -> Rollout:
    """A rollout of one demonstration-like sample of three tokens, without turns, with changes to the sample."""
    fields = {"id": ORDER.id, "group_id": ORDER.group_id, "prompt": PROMPT, "token_ids": np.array([1, 2, 7])}
    sample = Sample(**(fields | {"loss_mask": np.zeros(3, np.bool_)} | changes))  # type: ignore[arg-type]
    return Rollout(ORDER.id, ORDER.group_id, PROMPT, [sample], status, reward)


@pytest.mark.parametrize(
    ("rollout", "problem"),
    [
        (made(reward="good"), "its reward cannot be used: returned a str"),
        (made(reward=RewardResult(float("nan"))), "its reward cannot be used: the reward is nan"),
        (made(token_ids=np.array([1, 2, 2**40])), "the token id 1099511627776, which no vocabul"),
        (made(token_ids=np.array([1, -2, 3])), "the token id -2, which no vocabulary has"),
        (made(token_ids=np.array([1.0, 2.0, 7.0])), "token_ids as a ndarray: .*, not an array of integers"),
        (made(token_ids=[1, 2, 7], num_prompt_tokens=2), "token_ids as a list: .*, not an array of integers"),
        (made(loss_mask=np.zeros(3)), "loss_mask as a ndarray: .*, not an array of booleans"),
        (made(token_data={"margin": np.array([0, float("nan"), 0])}), "a value of margin that is not finite"),
        (made(token_data={"note": np.array(["a", "b", "c"])}), "note as a ndarray: .*, not an array of numbers"),
        (made(status="done"), "its status is 'done'; it is one of finished, truncated, failed"),
        (Rollout(ORDER.id, ORDER.group_id, PROMPT, ["sample"]), "one of its samples is a str: 'sample'"),  # type: ignore[list-item]
        ("rollout", "it returned str"),
    ],
)
def test_a_rollout_that_breaks_a_rule_is_refused_by_environment_and_sample(rollout: Any, problem: str) -> None:
    with pytest.raises(ContractError, match=f"environment 'games' .role 'game'., rollout p@0#0: .*{problem}"):
        checked_rollout(rollout, ORDER, ROLE)


def test_a_good_rollout_passes() -> None:
    for reward in (None, RewardResult(np.float32(1)), RewardResult(None, error="the judge was away")):
        assert checked_rollout(made(reward), ORDER, ROLE).reward is reward


async def test_tokens_are_told_on_the_loop_of_the_environment_before_the_completion() -> None:
    told: list[tuple[int, list[int], bool]] = []

    class Streams(Talk):
        async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
            here, sequence = asyncio.get_running_loop(), context.sequence()

            def on_tokens(start: int, ids: list[int]) -> None:
                told.append((start, ids, asyncio.get_running_loop() is here))

            sequence.sampled(await context.generate(sequence.token_ids, on_tokens=on_tokens))
            assert len(told) == 2
            return context.finished([sequence])

    async def streams(handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /) -> Completion:
        assert on_tokens is not None
        on_tokens(0, [7])
        await asyncio.sleep(0)
        on_tokens(1, [8])
        return await generate(handle, request)

    environments = LocalEnvironments(ROLE, Streams(looks=False), tokenizer=None)
    await environments.start()
    try:
        await environments.rollout(RolloutOrder("p@0#0", "p@0", PROMPT, SamplingParams(4), 0, 64, 30.0, None), streams)
    finally:
        environments.close()
    assert told == [(0, [7], True), (1, [8], True)]
