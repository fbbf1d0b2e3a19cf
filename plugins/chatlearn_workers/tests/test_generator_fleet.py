"""The driver's side of generator replicas, over stand-ins for their workers: no process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ReplicaLostError
from chatlearn_core.types import GenerateRequest, SamplingParams
from chatlearn_workers.blocks import Traffic
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.generator_fleet import RemoteGeneratorFleet, Replica
from chatlearn_workers.generator_worker import ReplicaReport
from chatlearn_workers.rpc_result import Failure

no_store: Any = None
"""Nothing is fetched: the answers are failures."""


class FakeWorker:
    """Takes requests, and answers each with a failure that names the worker: here it matters who is asked."""

    def __init__(self, index: int, generation: int) -> None:
        self.label = f"worker {index}.{generation}"
        self.requests: list[str] = []
        self.calls: list[str] = []
        self.numbers: asyncio.Queue[int] = asyncio.Queue()
        self.is_gone = False
        self.hangs = False

    def place(self, method: str) -> None:
        return None

    async def stacks(self) -> str:
        return "It hangs here: line 3"

    def kill(self) -> None:
        self.calls.append("kill")

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self.calls.append(method)
        if self.is_gone:
            raise WorkerDiedError(f"{self.label}, {method}: the process is gone")
        if self.hangs and method == "status":
            raise BackendTimeoutError(f"{self.label}, status: no answer")
        if method == "submit":
            self.requests += [request.id for _, request in arguments[0]]
            for number, _ in arguments[0]:
                self.numbers.put_nowait(number)
        return ReplicaReport("serving", 0) if method == "status" else None

    async def call_for_block(self, method: str, timeout_s: float) -> tuple[ReplicaReport, None]:
        if self.hangs:
            await asyncio.Event().wait()
        number = await self.numbers.get()
        if self.is_gone:
            raise WorkerDiedError(f"{self.label}, collect: the process is gone")
        failure = Failure.of(BackendError(f"answer of {self.label}"))
        return ReplicaReport("serving", 0, ((number, failure),)), None


def make_request(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.array([1]), SamplingParams(4), "g")


class Stand:
    def __init__(self, replicas: int, **settings: Any) -> None:
        self.workers: list[FakeWorker] = []
        self.built = [0] * replicas
        self.fleet = RemoteGeneratorFleet(
            "generator", self.launch, replicas, store=no_store, **({"timeout_s": 30.0} | settings)
        )

    async def launch(self, index: int) -> Any:
        self.workers.append(FakeWorker(index, self.built[index]))
        self.built[index] += 1
        return self.workers[-1]

    async def answer(self, name: str, replica: int | None = None) -> str:
        with pytest.raises(BackendError) as caught:
            await self.fleet.generate(make_request(name), replica)
        return str(caught.value)


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand(2, max_restarts=1)
    await stand.fleet.start()
    yield stand
    for replica in stand.fleet.replicas:
        replica.stop()


async def test_requests_go_past_a_replica_that_loads_weights(stand: Stand) -> None:
    with stand.fleet.loading([0]):
        assert "answer of worker 1.0" in await stand.answer("a", 0)
    assert "answer of worker 0.0" in await stand.answer("b", 0)
    assert [worker.requests for worker in stand.workers] == [["b"], ["a"]]


async def test_what_a_dead_worker_had_starts_again_on_the_one_in_its_place(stand: Stand) -> None:
    stand.workers[0].is_gone = True
    assert "answer of worker 0.1" in await stand.answer("a", 0)
    assert stand.workers[0].calls[-1] == "kill"
    stand.workers[2].is_gone = True
    with pytest.raises(ReplicaLostError, match=r"replica 0 died, and 1 restart\(s\), the limit"):
        await stand.fleet.generate(make_request("b"), 0)


async def test_a_worker_that_does_not_say_how_it_is_after_a_timeout_is_rebuilt(stand: Stand) -> None:
    stand.workers[0].hangs = True
    stand.fleet.timeout_s = 0.5
    assert "answer of worker 0.1" in await stand.answer("a", 0)


async def test_a_worker_that_lives_after_a_timeout_is_kept(stand: Stand) -> None:
    stand.fleet.timeout_s = 0.02
    stand.workers[0].numbers.put_nowait = lambda number: None  # type: ignore[method-assign]  # it is never answered
    with pytest.raises(
        BackendTimeoutError,
        match=r"request 'a' had no completion within 0\.02 s .*Its health check reports no problem.*It hangs here",
    ):
        await stand.fleet.generate(make_request("a"), 0)
    assert stand.fleet.num_restarts == 0


async def test_a_rebuilt_replica_that_does_not_get_the_weights_is_dead_and_built_again_as_often_as_it_may(
    stand: Stand,
) -> None:
    seen: list[str] = []

    async def resync(index: int) -> None:
        seen.append(stand.fleet.replicas[index].worker.label)
        raise BackendError("the transport is closed")

    stand.fleet.resync = resync
    stand.workers[0].is_gone = True
    with pytest.raises(ReplicaLostError, match="Last cause: the transport is closed"):
        await stand.fleet.generate(make_request("a"), 0)
    assert seen == ["worker 0.1"]
    assert stand.fleet.replicas[0].state == "dead"


async def test_a_late_report_neither_revives_a_replica_nor_changes_what_it_serves() -> None:
    worker: Any = FakeWorker(0, 0)
    replica = Replica(worker, no_store, Traffic())
    block: Any = None
    replica.policy_version = 3  # as the receipt of a sync said
    replica.note(ReplicaReport("loading", 2), block)
    assert (replica.state, replica.policy_version) == ("serving", 3)
    replica.lose(BackendError("it hangs"))
    replica.note(ReplicaReport("serving", 2), block)
    assert (replica.state, replica.policy_version) == ("dead", 3)


async def test_a_report_of_death_is_believed() -> None:
    worker: Any = FakeWorker(0, 0)
    replica = Replica(worker, no_store, Traffic())
    block: Any = None
    replica.note(ReplicaReport("dead", 3), block)
    assert replica.state == "dead"


async def test_tokens_of_a_streamed_request_come_with_the_reports() -> None:
    worker: Any = FakeWorker(0, 0)
    replica = Replica(worker, no_store, Traffic())
    block: Any = None
    told: list[tuple[int, list[int]]] = []
    streamed = asyncio.ensure_future(replica.generate(make_request("a"), lambda start, ids: told.append((start, ids))))
    plain = asyncio.ensure_future(replica.generate(make_request("b")))
    await asyncio.sleep(0)
    replica.note(ReplicaReport("serving", 0, tokens=((0, 0, [7, 8]), (1, 0, [9]))), block)
    replica.note(ReplicaReport("serving", 0, tokens=((0, 2, [5]),)), block)
    assert told == [(0, [7, 8]), (2, [5])]
    for task in (streamed, plain):
        task.cancel()
    await asyncio.gather(streamed, plain, return_exceptions=True)
    replica.stop()
