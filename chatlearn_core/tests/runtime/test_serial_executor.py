"""An executor runs blocking calls in order, and what goes wrong in one is named, with where it hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, CheckpointError
from chatlearn_core.runtime.serial_executor import SerialExecutor


@pytest.fixture
def executor() -> Iterator[SerialExecutor]:
    executor = SerialExecutor("trainer", timeout_s=30.0)
    yield executor
    executor.stop()


async def test_calls_run_one_after_the_other_in_a_thread_of_their_own(executor: SerialExecutor) -> None:
    events: list[str] = []
    first_runs, go_on = threading.Event(), threading.Event()

    def first() -> int:
        events.append("first starts")
        first_runs.set()
        go_on.wait()
        events.append("first ends")
        return threading.get_ident()

    def second() -> int:
        events.append("second")
        return threading.get_ident()

    calls = asyncio.gather(executor.run("first", first), executor.run("second", second))
    await asyncio.to_thread(first_runs.wait)
    go_on.set()
    threads = await calls
    assert events == ["first starts", "first ends", "second"]
    assert threads[0] == threads[1] != threading.get_ident()


async def test_arguments_and_result_pass_through(executor: SerialExecutor) -> None:
    assert await executor.run("divmod", divmod, 7, 3) == (2, 1)


async def test_a_timeout_carries_the_stack_of_the_call_that_hangs(executor: SerialExecutor) -> None:
    release = threading.Event()

    def waits_for_a_peer_that_is_gone() -> None:
        release.wait()

    with pytest.raises(BackendTimeoutError) as caught:
        await executor.run("update", waits_for_a_peer_that_is_gone, timeout_s=0.5)
    release.set()
    message = str(caught.value)
    assert "role 'trainer': update did not return within 0.5 s (roles.trainer.timeout_s)" in message
    assert "in waits_for_a_peer_that_is_gone" in message


async def test_a_timeout_names_the_setting_that_bounds_the_call(executor: SerialExecutor) -> None:
    release = threading.Event()
    with pytest.raises(BackendTimeoutError, match=r"send did not return within 0\.01 s \(weight_sync\.timeout_s\)"):
        await executor.run("send", release.wait, timeout_s=0.01, setting="weight_sync.timeout_s")
    release.set()
    assert await executor.run("after", lambda: "still works") == "still works"


@pytest.mark.parametrize(
    "error", [ValueError("bad shape"), StopIteration("empty"), SystemExit(3), TimeoutError("peer")]
)
async def test_what_a_call_raises_becomes_an_error_that_names_role_and_method(
    executor: SerialExecutor, error: BaseException
) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(BackendError, match=rf"role 'trainer': save failed: {type(error).__name__}: ") as caught:
        await executor.run("save", fails)
    assert not isinstance(caught.value, BackendTimeoutError), "a call's own TimeoutError is not ours"
    assert caught.value.__cause__ is error


async def test_a_cancellation_that_comes_together_with_the_result_is_not_lost(executor: SerialExecutor) -> None:
    started, release = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        release.wait()

    running = asyncio.create_task(executor.run("update", call))
    while not started.is_set():
        await asyncio.sleep(0)
    running.cancel()
    release.set()
    assert executor.stop(wait_s=30.0)  # blocks the event loop: cancellation and result now wait for the same turn
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_chatlearns_own_errors_pass_unchanged(executor: SerialExecutor) -> None:
    error = CheckpointError("cut short")

    def fails() -> None:
        raise error

    with pytest.raises(CheckpointError) as caught:
        await executor.run("load", fails)
    assert caught.value is error


async def test_stop_lets_queued_calls_finish(executor: SerialExecutor) -> None:
    done: list[int] = []
    call = asyncio.ensure_future(executor.run("call", done.append, 1))
    await asyncio.sleep(0)
    assert executor.stop(wait_s=30.0)
    await call
    assert done == [1]
    assert "has ended" in executor.stack()


async def test_stop_tells_when_a_call_still_runs(executor: SerialExecutor) -> None:
    release = threading.Event()
    call = asyncio.ensure_future(executor.run("hang", release.wait))
    await asyncio.sleep(0)
    assert not executor.stop(wait_s=0.01)
    release.set()
    assert await call


async def test_the_backend_is_asked_how_it_is_when_a_call_fails_or_has_no_answer(executor: SerialExecutor) -> None:
    problem: str | None = None
    executor.health = lambda: problem

    def fail() -> None:
        raise CheckpointError("the disk is full")

    release = threading.Event()
    with pytest.raises(BackendTimeoutError, match=r"Its health check reports no problem\. It hangs here"):
        await executor.run("update", release.wait, timeout_s=0.05)
    release.set()
    with pytest.raises(CheckpointError, match=r"^the disk is full$"):
        await executor.run("save", fail)
    problem = "optimizer step 3 failed midway"
    with pytest.raises(
        CheckpointError, match=r"the disk is full\nIt reports of itself \(health\): optimizer step 3 fai"
    ):
        await executor.run("save", fail)
    with pytest.raises(BackendError, match=r"divmod failed: ZeroDivisionError.*\nIt reports of itself.*step 3"):
        await executor.run("divmod", divmod, 7, 0)
