"""Roles call roles: who may call whom, who is named in an error, and whose time runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, ReplicaLostError
from chatlearn_core.plugins.builtin import chatlearn_outputs
from chatlearn_core.protocols import ModelSource, PlainData
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.runtime.plan import UsedRole
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    OutputRequest,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    VersionSpan,
    pack_samples,
)
from chatlearn_runtime_kit.rewards import CombinedReward, RewardPart
from chatlearn_runtime_kit.role_handles import ComputeRequest, Handle, RoleCalls

GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def make_handle(ask: Any, kind: str = "generator", max_open: int = 256) -> Handle:
    used = UsedRole("judge", kind, ModelSource("m", "m"), weights_change=False)
    return Handle("reward", used, SimpleNamespace(), ask, max_open)  # type: ignore[arg-type]  # no model is looked at


def completion_of(request: GenerateRequest, *ids: int) -> Completion:
    spans = (VersionSpan(0, len(ids), 0),)
    logprobs = np.full(len(ids), -1.0, np.float32)
    return Completion(request.id, np.array(ids), logprobs, request.sampling.basis, "stop", request.sampling, spans)


def make_sample(number: int = 0) -> Sample:
    prompt = Prompt(f"p{number}", np.array([1, 2]), "?")
    return Sample(f"p{number}@1#0", f"p{number}@1", prompt, np.array([1, 2, 3]), np.array([False, False, True]))


class JudgedReward:
    """Asks its handle about every sample, for as long as the handle takes."""

    def __init__(self, handle: Handle, own_s: float = 0.0) -> None:
        self.handle, self.own_s = handle, own_s

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        async def one(sample: Sample) -> RewardResult:
            try:
                found = await self.handle.generate(sample.token_ids, GREEDY, request_id=sample.id)
            except ReplicaLostError:
                return RewardResult(0.0)  # a reward that makes light of it
            await asyncio.sleep(self.own_s)
            return RewardResult(float(found.token_ids[0]))

        return list(await asyncio.gather(*map(one, samples)))


def group(handle: Handle, timeout_s: float, own_s: float = 0.0) -> CombinedReward:
    part: Any = JudgedReward(handle, own_s)
    return CombinedReward("reward", [RewardPart("judged", part)], timeout_s)


async def test_a_classifier_answers_with_its_score() -> None:
    asked = []

    async def ask(role: str, request: Any) -> Completion:
        asked.append(request)
        return replace(completion_of(request), score=0.25)

    assert await make_handle(ask).classify(np.array([4, 5]), request_id="a", group_id="g") == 0.25
    [request] = asked
    assert (request.id, request.prompt_ids.tolist(), request.group_id, request.classify) == ("reward/a", [4, 5], "g", 1)
    with pytest.raises(ContractError, match="calls classify of role 'judge', which is a trainer"):
        await make_handle(ask, "trainer").classify(np.array([4]), request_id="a")

    async def interrupted(role: str, request: Any) -> Completion:
        return completion_of(request)

    with pytest.raises(BackendError, match="'judge' was interrupted before it classified request 'reward/a'"):
        await make_handle(interrupted).classify(np.array([4]), request_id="a")


async def test_the_time_of_the_other_role_is_not_the_rewards() -> None:
    async def ask(role: str, request: Any) -> Completion:
        await asyncio.sleep(0.3)
        return completion_of(request, 7)

    results = await group(make_handle(ask), timeout_s=0.1).score([make_sample(i) for i in range(3)])
    assert [result.value for result in results] == [7.0, 7.0, 7.0]


async def test_the_rewards_own_time_runs_on_after_the_wait() -> None:
    async def ask(role: str, request: Any) -> Completion:
        await asyncio.sleep(0.05)
        return completion_of(request, 7)

    [result] = await group(make_handle(ask), timeout_s=0.1, own_s=30.0).score([make_sample()])
    assert result.error == "judged: no answer within 0.1 s (roles.reward.timeout_s)"


async def test_a_role_that_is_lost_ends_the_run_whatever_the_reward_makes_of_it() -> None:
    async def ask(role: str, request: Any) -> Completion:
        raise ReplicaLostError("replica 0 of the judge died")

    with pytest.raises(ReplicaLostError, match="of the judge"):
        await group(make_handle(ask), timeout_s=5.0).score([make_sample()])


async def test_no_more_calls_are_open_than_may_be() -> None:
    num_open = most = 0

    async def ask(role: str, request: Any) -> Completion:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0)
        num_open -= 1
        return completion_of(request, 7)

    handle = make_handle(ask, max_open=2)
    results = await group(handle, timeout_s=5.0).score([make_sample(i) for i in range(9)])
    assert len(results) == 9
    assert most == 2


async def test_a_handle_does_what_its_kind_can() -> None:
    async def ask(role: str, request: Any) -> Any:
        raise AssertionError

    with pytest.raises(ContractError, match="role 'reward' calls compute of role 'judge', which is a generator"):
        await make_handle(ask).compute(pack_samples([make_sample()]), OutputRequest(frozenset({"scores"})))
    with pytest.raises(ContractError, match="calls generate of role 'judge', which is a trainer"):
        await make_handle(ask, "trainer").generate(np.array([1]), GREEDY, request_id="r")


class FakeRuntime:
    """Gives the answers that the test sets."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.data = PlainData()

    async def ask_generator(self, role: str, request: GenerateRequest) -> Any:
        return await self._answer(request)

    def trainer(self, role: str) -> Any:
        return SimpleNamespace(compute=self._answer)

    async def _answer(self, *asked: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(*asked)


def calls(answer: Any) -> RoleCalls:
    origin = Origin("judge", "generator 'fake'", 100)
    roles = {
        "judge": SimpleNamespace(kind="generator", origin=origin),
        "rm": SimpleNamespace(kind="trainer", origin=origin),
    }
    registry = SimpleNamespace(outputs={spec.name: spec for spec in chatlearn_outputs()})
    owner: Any = SimpleNamespace(name="reward", kind="reward", used_roles=frozenset({"judge", "rm"}))
    plan: Any = SimpleNamespace(roles=roles, registry=registry)
    runtime: Any = FakeRuntime(answer)
    return RoleCalls(owner, plan, runtime)


REQUEST = GenerateRequest("r", np.array([1]), GREEDY)


async def test_an_error_says_who_waited_for_whom() -> None:
    with pytest.raises(BackendTimeoutError, match="reward role 'reward' waited for generator role 'judge': no answer"):
        await calls(BackendTimeoutError("no answer within 5 s")).ask("judge", REQUEST)


async def test_only_roles_that_are_used_are_called() -> None:
    with pytest.raises(ContractError, match="calls role 'policy', which is none that it uses; it uses judge, rm"):
        await calls(None).ask("policy", REQUEST)


async def test_what_comes_back_is_checked() -> None:
    with pytest.raises(ContractError, match="breaks the contract"):
        await calls(lambda request: completion_of(request, 100)).ask("judge", REQUEST)
    found: Any = await calls(lambda request: completion_of(request, 99)).ask("judge", REQUEST)
    assert found.token_ids.tolist() == [99]
    batch = pack_samples([make_sample(), make_sample(1)])
    scores = OutputRequest(frozenset({"scores"}))
    with pytest.raises(ContractError, match="in the shape"):
        await calls(lambda *asked: {"scores": torch.ones(3)}).ask("rm", ComputeRequest(batch, scores))
    answer: Any = await calls(lambda *asked: {"scores": torch.ones(2)}).ask("rm", ComputeRequest(batch, scores))
    assert answer["scores"].tolist() == [1.0, 1.0]
    with pytest.raises(ContractError, match="asks trainer role 'rm' for the output 'logprobs'; only outputs of one"):
        await calls(None).ask("rm", ComputeRequest(batch, OutputRequest(frozenset({"logprobs"}))))
