from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatlearn_runtime_kit.restart_budget import is_death
from chatlearn_workers.errors import WorkerDiedError
from chatlearn_workers.host import stopped_below
from chatlearn_workers.remote import RemoteWorker
from chatlearn_workers.rpc import AnswerLostError, CallError, ProcessEndedError, UnreachableError
from chatlearn_workers.rpc_result import RpcResult


async def test_an_answer_that_is_lost_with_its_node_is_a_death() -> None:
    """The process had answered before its node went: only another one can answer now."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    answer.set_exception(AnswerLostError("00ff"))
    worker = RemoteWorker("role 'trainer', rank 1 of 2", Process(), 1.0, "roles.trainer.timeout_s", 60.0)
    with pytest.raises(
        WorkerDiedError, match=r"'trainer', rank 1 of 2, update: its answer was lost with its node"
    ) as e:
        await worker._answer("update", answer, 1.0)
    assert is_death(e.value)
    assert (e.value.place.role, e.value.place.method) == ("trainer", "update")


class Process:
    """A handle on no process: it may be stopped, and calls that wait for it learn that it was killed."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.num_asked = 0
        self.failure: Exception | None = None
        """Of the next answer to whether it is there."""
        self.stopped_below: list[int] = []
        self.open: list[asyncio.Future[Any]] = []

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.is_stopped or "hang" in arguments:
            self.open.append(answer)
        else:
            answer.set_result(RpcResult(None))
        return answer

    def call_stored(self, method: str, *arguments: Any) -> Any:
        raise NotImplementedError("no test asks for it")

    def ask(self, method: str) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.num_asked += 1
        failure, self.failure = self.failure, None
        if self.is_stopped:
            self.open.append(answer)
        elif failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(list(self.stopped_below))
        return answer

    def kill(self) -> None:
        for answer in self.open:
            if not answer.done():
                answer.set_exception(ProcessEndedError("it was killed"))


@pytest.fixture
async def worker() -> AsyncIterator[RemoteWorker]:
    worker = RemoteWorker("role 'reward', worker 0", Process(), 60.0, "roles.reward.timeout_s", 0.06)
    yield worker
    worker.kill()


async def asked(worker: RemoteWorker, times: int) -> None:
    before = worker.handle.num_asked
    async with asyncio.timeout(30):
        while worker.handle.num_asked < before + times:
            await asyncio.sleep(0.001)


async def test_a_process_that_stops_answering_is_killed_and_dead(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    await asked(worker, 2)
    worker.handle.is_stopped = True
    with pytest.raises(WorkerDiedError, match=r"score: the process is gone: it did not answer for .*heartbeat_time"):
        await worker.call("score")


@pytest.mark.parametrize("failure", [AnswerLostError("00ff"), UnreachableError("unavailable"), CallError("?")])
async def test_one_that_cannot_be_asked_once_is_asked_again(
    worker: RemoteWorker, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    await worker.start(None, 60.0)
    await asked(worker, 2)
    worker.handle.failure = failure
    with caplog.at_level(logging.WARNING):
        await asked(worker, 3)
    assert "role 'reward', worker 0: cannot be asked whether it is there" in caplog.text
    worker.handle.is_stopped = True
    with pytest.raises(WorkerDiedError, match=r"score: the process is gone: it did not answer for"):
        await worker.call("score")


async def test_one_that_has_ended_is_asked_no_more(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    await asked(worker, 2)
    worker.handle.failure = ProcessEndedError("it has ended")
    assert worker._watch is not None
    async with asyncio.timeout(30):
        await worker._watch


async def test_one_whose_engine_has_a_stopped_process_is_killed_and_dead(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    busy = asyncio.create_task(worker.call("hang"))
    worker.handle.stopped_below = [77]
    with pytest.raises(WorkerDiedError, match=r"the process is gone: process 77, which it started, has been stopped"):
        await busy


async def test_processes_that_go_on_again_are_no_reason(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    busy = asyncio.create_task(worker.call("hang"))
    for number in range(30):
        worker.handle.stopped_below = [number % 3]
        await asked(worker, 1)
    assert not busy.done()
    busy.cancel()


def test_stopped_processes_are_found_below_those_that_go_on() -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert stopped_below(os.getpid()) == []
        os.kill(child, signal.SIGSTOP)
        while not (found := stopped_below(os.getpid())):
            pass
        assert found == [child]
    finally:
        os.kill(child, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


async def test_one_that_is_busy_and_answers_is_left_alone(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    busy = asyncio.create_task(worker.call("hang"))
    await asked(worker, 20)
    assert not busy.done()
    busy.cancel()


async def test_a_driver_that_is_held_up_blames_nobody(worker: RemoteWorker) -> None:
    await worker.start(None, 60.0)
    await asked(worker, 2)
    busy = asyncio.create_task(worker.call("hang"))
    await asyncio.sleep(0)
    time.sleep(5 * worker.silence_s)
    await asked(worker, 3)
    assert not busy.done()
    busy.cancel()


async def test_one_that_starts_may_be_silent_for_longer_but_not_for_ever(worker: RemoteWorker) -> None:
    starting = asyncio.create_task(worker.start("hang", 60.0))
    await asked(worker, 2)
    worker.handle.is_stopped = True
    with pytest.raises(WorkerDiedError, match=r"start: the process is gone: it did not answer for"):
        await starting
    assert is_death(WorkerDiedError())
