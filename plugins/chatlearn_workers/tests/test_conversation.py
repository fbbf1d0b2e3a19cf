"""Calls that use other roles while they run get their answers, in whatever order the calls end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, ReplicaLostError
from chatlearn_workers import conversation
from chatlearn_workers.conversation import AskingWorker, converse, current_call
from chatlearn_workers.rpc_result import Failure


class Worker(AskingWorker):
    """Its methods ask a role by the name ``judge``."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = 0

    async def twice(self, values: list[int]) -> list[int]:
        return list(await asyncio.gather(*(current_call().ask("judge", value) for value in values)))

    async def listens(self) -> tuple[str, list[Any]]:
        told: list[Any] = []
        answer = await current_call().ask("judge", 1, lambda start, token_ids: told.append((start, token_ids)))
        return answer, told

    async def nothing(self) -> str:
        return "done"

    async def fails(self) -> None:
        raise BackendError("no such file")

    async def says_why(self) -> str:
        try:
            await current_call().ask("judge", 1)
        except BackendTimeoutError as error:
            return str(error)
        raise AssertionError

    async def makes_light_of_it(self) -> str:
        try:
            await current_call().ask("judge", 1)
        except ReplicaLostError:
            return "never mind"
        raise AssertionError

    async def gives_up(self) -> str:
        try:
            async with asyncio.timeout(0.01):
                await current_call().ask("judge", 1)
        except TimeoutError:
            await current_call().ask("judge", 2)
        return "had the second"

    async def hangs(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Remote:
    """A worker behind calls that copy nothing, each in a task of its own, as a runtime makes them."""

    label, timeout_s = "role 'reward', worker 0", 5.0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def place(self, method: str) -> None:
        return None

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        async with asyncio.timeout(timeout_s):
            return await asyncio.create_task(getattr(self.worker, method)(*arguments))


@pytest.fixture
def worker() -> Worker:
    return Worker()


def talk(worker: Worker, method: str, *arguments: Any, ask: Any = None) -> Any:
    return converse(Remote(worker), method, *arguments, ask=ask)  # type: ignore[arg-type]  # stands for a worker


async def test_what_a_call_asks_is_answered_in_any_order(worker: Worker) -> None:
    async def ask(name: str, value: int) -> int:
        assert name == "judge"
        await asyncio.sleep(0.02 if value == 1 else 0)
        return 10 * value

    assert await talk(worker, "twice", [1, 2, 3], ask=ask) == [10, 20, 30]
    assert await talk(worker, "nothing") == "done"
    assert worker.conversations._calls == {}


async def test_a_call_is_told_of_tokens_before_its_answer(worker: Worker) -> None:
    async def ask(name: str, value: int, on_tokens: Any) -> str:
        for start in range(20):
            on_tokens(start, [start, 7])
            await asyncio.sleep(0.001 * (start % 3))
        return "done"

    assert await talk(worker, "listens", ask=ask) == ("done", [(start, [start, 7]) for start in range(20)])


async def test_a_failure_to_tell_ends_the_call(worker: Worker) -> None:
    async def ask(name: str, value: int, on_tokens: Any) -> str:
        on_tokens(0, [7])
        await asyncio.sleep(0.01)
        return "done"

    async def tell(*arguments: Any) -> None:
        raise BackendError("no connection")

    worker.tell = tell  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="no connection"):
        async with asyncio.timeout(10):
            await talk(worker, "listens", ask=ask)


async def test_two_calls_do_not_mix(worker: Worker) -> None:
    async def ask(name: str, value: int) -> int:
        await asyncio.sleep(0.001 * (7 - value))
        return value

    results = await asyncio.gather(*(talk(worker, "twice", [n, n + 1], ask=ask) for n in range(5)))
    assert results == [[n, n + 1] for n in range(5)]


async def test_errors_keep_their_class_in_both_directions(worker: Worker) -> None:
    async def late(name: str, value: int) -> int:
        raise BackendTimeoutError("the judge said nothing for 5 s")

    assert await talk(worker, "says_why", ask=late) == "the judge said nothing for 5 s"
    with pytest.raises(BackendError, match="role 'reward', worker 0, fails: no such file"):
        await talk(worker, "fails")


async def test_a_role_that_is_lost_ends_the_run(worker: Worker) -> None:
    async def lost(name: str, value: int) -> int:
        raise ReplicaLostError("replica 0 died")

    with pytest.raises(ReplicaLostError, match="replica 0 died"):
        await talk(worker, "makes_light_of_it", ask=lost)


async def test_what_is_no_longer_waited_for_is_ended(worker: Worker) -> None:
    ended: list[int] = []

    async def ask(name: str, value: int) -> int:
        try:
            await asyncio.sleep(60 if value == 1 else 0.05)
        except asyncio.CancelledError:
            ended.append(value)
            raise
        return value

    assert await talk(worker, "gives_up", ask=ask) == "had the second"
    assert ended == [1]


async def test_a_call_that_is_given_up_ends_in_the_worker(worker: Worker) -> None:
    call = asyncio.ensure_future(talk(worker, "hangs"))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.02)
    assert worker.cancelled == 1
    assert worker.conversations._calls == {}


async def test_a_quiet_call_is_asked_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "PROGRESS_S", 0.01)

    async def ask(name: str, value: int) -> int:
        await asyncio.sleep(0.1)
        return value

    assert await talk(worker, "twice", [4], ask=ask) == [4]


async def test_outside_of_a_call_nothing_is_asked() -> None:
    with pytest.raises(ContractError, match="when no call on this worker is open"):
        current_call()


def test_a_failure_that_is_delivered_has_its_own_words() -> None:
    error = conversation._raised(Failure.of(ReplicaLostError("replica 0 died")))
    assert (type(error), str(error)) == (ReplicaLostError, "replica 0 died")
