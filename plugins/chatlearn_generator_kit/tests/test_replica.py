"""What every generator does alike, with an engine that answers when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols import RoleContext
from chatlearn_core.types import Completion, GenerateRequest, SamplingParams
from chatlearn_generator_kit.pending_request import EngineRequest
from chatlearn_generator_kit.replica import CLOSED, GeneratorReplica

TURNS = 20
"""Turns of the event loop in which a request that is not held would reach the engine."""


class Replica(GeneratorReplica[EngineRequest]):
    """Its engine has requests until ``answer``."""

    def __init__(self) -> None:
        super().__init__("test", RoleContext("actor", replica=3), EngineRequest)
        self.engine: dict[int, EngineRequest] = {}
        self.calls: list[Any] = []
        self.memory: str | None = None
        self.loss: str | None = None
        self._start_serving(model_length=32, vocab_size=100)

    def _submit_inbox(self) -> None:
        asyncio.get_running_loop().call_soon(self._submit)

    def _submit(self) -> None:
        self.engine |= {pending.number: pending for pending in self._take_inbox()}

    def _drop(self, pending: EngineRequest) -> None:
        self.calls.append(("drop", pending.request.id))
        self.engine.pop(pending.number, None)

    async def _abort(self, pending: Sequence[EngineRequest]) -> None:
        for one in pending:
            self.answer(one.request.id, "abort", [5])

    async def _pause(self) -> None:
        self.calls.append("pause")

    async def _resume(self) -> None:
        self.calls.append("resume")
        self._submit()

    def _memory_problem(self) -> str | None:
        return self.memory

    def _find_loss(self) -> str | None:
        return self.loss

    def answer(self, request_id: str, reason: str, token_ids: list[int]) -> None:
        number = next(n for n, pending in self.engine.items() if pending.request.id == request_id)
        pending = self.engine.pop(number)
        pending.take(token_ids, [-1.0] * len(token_ids), [(0, self.policy_version)])
        assert pending.problem(reason) is None
        pending.finish(pending.whole(reason, "text"))

    @property
    def names(self) -> list[str]:
        return [pending.request.id for pending in self.engine.values()]

    @property
    def weights_are_offloaded(self) -> bool:
        return self.memory is not None


def ask(name: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2]), SamplingParams(max_tokens=3, temperature=0.0), **fields)


async def begin(replica: Replica, *names: str) -> list[asyncio.Task[Completion]]:
    tasks = [asyncio.ensure_future(replica.generate(ask(name))) for name in names]
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return tasks


async def test_requests_reach_the_engine_in_order_and_are_answered() -> None:
    replica = Replica()
    first, second = await begin(replica, "a", "b")
    assert replica.names == ["a", "b"]
    replica.answer("b", "length", [7, 8, 9])
    replica.answer("a", "stop", [7])
    assert ((await first).finish_reason, (await second).token_ids.tolist()) == ("stop", [7, 8, 9])
    assert replica.name == "generator role 'actor' replica 3 (test)"
    assert not replica._pending


async def test_requests_submitted_while_paused_wait_in_order_behind_earlier_ones() -> None:
    replica = Replica()
    [running] = await begin(replica, "running")
    early = asyncio.ensure_future(replica.generate(ask("early")))
    await asyncio.sleep(0)
    pausing = asyncio.ensure_future(replica.pause())
    tasks = await begin(replica, "late")
    await pausing
    assert not replica.is_generating
    assert replica.names in (["running"], ["running", "early"])
    await replica.resume()
    assert replica.names == ["running", "early", "late"]
    for name, task in zip(["running", "early", "late"], [running, early, *tasks], strict=True):
        replica.answer(name, "length", [1, 2, 3])
        assert (await task).request_id == name


async def test_an_abort_answers_waiting_requests_at_once_and_running_ones_with_partial_completions() -> None:
    replica = Replica()
    [running] = await begin(replica, "running")
    await replica.pause()
    held, other = await begin(replica, "held", "other")
    await replica.abort(["running", "held", "unknown"])
    assert ((await running).finish_reason, (await running).token_ids.tolist()) == ("abort", [5])
    assert ((await held).finish_reason, len((await held).token_ids)) == ("abort", 0)
    assert not other.done()
    await replica.abort()
    assert (await other).finish_reason == "abort"


async def test_a_whole_completion_is_not_sampled_again() -> None:
    replica = Replica()
    [task] = await begin(replica, "a")
    replica.answer("a", "length", [7, 8, 9])
    again = await replica.generate(ask("b", resume_from=await task))
    assert (again.request_id, again.token_ids.tolist(), again.finish_reason) == ("b", [7, 8, 9], "length")
    assert not replica.engine


async def test_a_request_that_expires_or_is_cancelled_leaves_the_engine() -> None:
    replica = Replica()
    with pytest.raises(BackendTimeoutError, match=r"\(test\): request 'slow' \(2 prompt tokens, max_tokens 3\) had no"):
        await replica.generate(ask("slow", timeout_s=0.01))
    [cancelled] = await begin(replica, "cancelled")
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert replica.calls == [("drop", "slow"), ("drop", "cancelled")]
    assert not replica.engine
    await replica.pause()
    with pytest.raises(BackendTimeoutError, match="'held'"):
        await replica.generate(ask("held", timeout_s=0.01))
    assert replica.calls[2:] == ["pause"], "what the engine never had is not dropped there"


async def test_death_fails_every_call_and_its_first_reason_stays() -> None:
    replica = Replica()
    [running] = await begin(replica, "running")
    await replica.pause()
    [held] = await begin(replica, "held")
    replica.loss = "its process 7 was killed"
    assert (replica.state, replica.health(), replica.is_dead) == ("dead", "its process 7 was killed", True)
    for name, task in (("running", running), ("held", held)):
        with pytest.raises(BackendError, match=f"request '{name}' failed: its process 7 was killed"):
            await task
    await replica.die("something else")
    assert replica.health() == "its process 7 was killed"
    with pytest.raises(BackendError, match="is dead and cannot take request 'late'; restart it: its process 7"):
        await replica.generate(ask("late"))
    await replica.pause()
    await replica.resume()
    await replica.abort()
    assert replica.calls == ["pause"], "a dead engine is not called"
    replica._set_dead(CLOSED)
    assert replica.health() == CLOSED


async def test_a_death_in_another_thread_reaches_the_event_loop() -> None:
    replica = Replica()
    [running] = await begin(replica, "running")
    cause = OSError("no memory")
    await asyncio.to_thread(replica._set_dead, "sleep failed", cause)
    with pytest.raises(BackendError, match="sleep failed") as caught:
        await asyncio.wait_for(running, timeout=30)
    assert caught.value.__cause__ is cause


async def test_requests_wait_for_new_weights_only_while_paused() -> None:
    replica = Replica()
    await replica.stop_serving()
    assert replica.health() == "weights are being loaded"
    with pytest.raises(BackendError, match="is loading and cannot take request 'x'; pause it before a sync"):
        await replica.generate(ask("x"))
    await replica.pause()
    [waiting] = await begin(replica, "waiting")
    await replica.serve(4)
    assert (replica.policy_version, replica.state, replica.health()) == (4, "serving", None)
    await replica.resume()
    replica.answer("waiting", "length", [1, 2, 3])
    assert (await waiting).version_spans[0].version == 4
    with pytest.raises(BackendError, match="cannot serve version 5"):
        await replica.serve(5)


async def test_generation_is_refused_while_memory_is_offloaded() -> None:
    replica = Replica()
    replica.memory = "has 'weights' offloaded; onload it before generating"
    with pytest.raises(BackendError, match=r"\(test\) has 'weights' offloaded"):
        await replica.generate(ask("x"))
    await replica.pause()
    with pytest.raises(BackendError, match="has 'weights' offloaded"):
        await replica.resume()
    assert replica.calls == ["pause"]


async def test_requests_are_checked_before_an_engine_sees_them() -> None:
    replica = Replica()
    with pytest.raises(BackendError, match="prompt token 100 is outside"):
        await replica.generate(GenerateRequest("x", np.array([100]), SamplingParams(max_tokens=1)))
    assert not replica.engine
    with pytest.raises(BackendError, match=r"has no model; set model\.path or roles\.actor\.model\.path"):
        replica._require_model()
