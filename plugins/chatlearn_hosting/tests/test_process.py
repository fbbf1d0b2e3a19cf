from __future__ import annotations

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    HostedCallError,
    HostedProcessLostError,
)
from chatlearn_hosting import HostedProcess
from chatlearn_hosting.launch import BOOTSTRAP
from chatlearn_hosting.process_group import live_members

MODULES = [
    "chatlearn_hosting",
    "chatlearn_hosting.engine_side",
    "chatlearn_hosting.engine_side.server",
    "chatlearn_hosting.engine_side.shared_files",
    "chatlearn_hosting.engine_side.wire",
]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_end(pid: int, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.02)


async def cancelled_there(hosted: HostedProcess) -> list[str]:
    """What the child has cancelled: a task hears of it in its next turn."""
    async with asyncio.timeout(60):
        while not (cancelled := await hosted.acall("release")):
            pass
    return cancelled


def test_methods_are_called_with_plain_values(hosted) -> None:
    values = (None, True, 3, 0.5, "ä", b"\0", bytearray(b"x"), [1, [2]], {"k": (1,)}, {1, 2}, frozenset({3}))
    assert hosted.call("echo", *values, timeout_s=60, key=values) == (values, {"key": values})
    assert hosted.call("greet", timeout_s=60) == "hello from hosted_example.neighbour"


def test_the_child_finds_its_packages_without_touching_its_path(hosted, package) -> None:
    executable, path, modules = hosted.call("interpreter", timeout_s=60)
    assert executable == sys.executable
    assert str(BOOTSTRAP.parent) not in path
    assert str(package.parent) not in path
    assert modules == MODULES


def test_processes_that_the_engine_spawns_find_the_package_too(hosted) -> None:
    assert hosted.call("spawn_by_multiprocessing", timeout_s=60) == [8, "1"]
    assert hosted.call("environment", "HOSTED_SPAWNED", timeout_s=60) is None, "the child itself was not spawned"


def test_a_factory_may_be_a_coroutine(make) -> None:
    process = make("build_slowly", greeting="good morning")
    process.start(timeout_s=60)
    assert process.call("greet", timeout_s=60).startswith("good morning")


def test_big_messages_arrive_whole_both_ways_beside_small_ones(hosted) -> None:
    big = os.urandom(40 << 20)

    async def both() -> None:
        small = [hosted.acall("echo", number) for number in range(50)]
        ((answer,), _), *answers = await asyncio.gather(hosted.acall("echo", big), *small)
        assert answer == big
        assert [args for args, _ in answers] == [(number,) for number in range(50)]

    asyncio.run(both())


async def test_calls_overlap_and_begin_in_their_order(hosted) -> None:
    waiting = [asyncio.ensure_future(hosted.acall("wait", str(number))) for number in range(5)]
    assert await hosted.acall("greet")  # is answered while five others wait
    assert not any(call.done() for call in waiting)
    await hosted.acall("release")
    assert await asyncio.gather(*waiting) == list("01234")


async def test_events_come_in_order_on_the_loop_and_before_the_result(hosted) -> None:
    told: list[int] = []
    loop_thread = threading.get_ident()

    def on_event(value: int) -> None:
        assert threading.get_ident() == loop_thread
        told.append(value)

    assert await hosted.acall("count", 100, on_event=on_event) == 100
    assert told == list(range(100))


async def test_an_event_callback_that_raises_ends_its_call(hosted) -> None:
    def on_event(value: int) -> None:
        raise ZeroDivisionError(f"at {value}")

    with pytest.raises(ZeroDivisionError, match="at 0"):
        await hosted.acall("count", 3, on_event=on_event)
    assert await hosted.acall("greet")


def test_a_sent_call_cannot_be_cancelled_and_runs_in_order(hosted) -> None:
    waiting = hosted.begin("wait", "begun")
    told = [hosted.begin("echo", number) for number in range(3)]
    assert [future.result(10)[0] for future in told] == [(0,), (1,), (2,)]
    assert not waiting.cancel()
    assert hosted.begin("release").result(10) == []
    assert waiting.result(10) == "begun"
    with pytest.raises(HostedCallError, match="fail failed: KeyError: 'no'"):
        hosted.begin("fail", "no").result(10)
    hosted.close()
    with pytest.raises(HostedProcessLostError, match="it was closed"):
        hosted.begin("greet")


async def test_a_cancelled_call_is_cancelled_there(hosted) -> None:
    call = asyncio.ensure_future(hosted.acall("wait", "given up"))
    await asyncio.sleep(0)  # "wait" is sent first: a call that is cancelled before it starts records nothing
    await hosted.acall("greet")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await cancelled_there(hosted) == ["given up"]


def test_calls_from_several_threads_get_their_own_answers(hosted) -> None:
    answers: dict[int, object] = {}

    def ask(number: int) -> None:
        answers[number] = hosted.call("echo", number, timeout_s=60)[0][0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: number for number in range(16)}


def test_an_exception_there_is_an_error_here(hosted) -> None:
    with pytest.raises(HostedCallError, match=r"the engine: fail failed: KeyError: 'tensor 7'") as caught:
        hosted.call("fail", "tensor 7", timeout_s=60)
    assert caught.value.type_name == "KeyError"
    assert "in fail\n    raise KeyError(text)" in caught.value.__notes__[0]
    with pytest.raises(HostedCallError, match="AttributeError: Target has no method '__init__'"):
        hosted.call("__init__", timeout_s=60)


def test_what_is_not_plain_is_refused_by_name_on_either_side(hosted) -> None:
    with pytest.raises(TypeError, match="PosixPath cannot be sent"):
        hosted.call("echo", Path("x"), timeout_s=60)
    with pytest.raises(HostedCallError, match=r"builtins\.object cannot be sent"):
        hosted.call("bad_answer", timeout_s=60)
    assert hosted.call("greet", timeout_s=60)


@pytest.mark.parametrize(
    ("how", "words"), [("signal", r"killed by signal 9 \(SIGKILL\)"), ("exit", "exited with code 7")]
)
async def test_a_dead_child_fails_every_open_call_with_its_last_output(hosted, how, words) -> None:
    await hosted.acall("noise", "scheduler: out of memory")
    waiting = [asyncio.ensure_future(hosted.acall("wait", str(number))) for number in range(3)]
    await hosted.acall("greet")
    with pytest.raises(
        HostedProcessLostError, match=rf"the engine: die failed: its process \d+ (was )?{words}"
    ) as caught:
        await hosted.acall("die", how)
    assert "| scheduler: out of memory" in str(caught.value)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, HostedProcessLostError)
    assert hosted.lost is not None
    with pytest.raises(HostedProcessLostError, match="echo failed: its process"):
        hosted.call("echo", timeout_s=60)


@pytest.mark.slow
def test_a_child_that_hangs_up_is_ended(hosted) -> None:
    # It is killed, unless another of its threads finds the connection closed first and ends it.
    with pytest.raises(HostedProcessLostError, match=r"SIGKILL|exited with code"):
        hosted.call("hang_up", timeout_s=60)


def test_a_timeout_names_process_method_and_stack(hosted) -> None:
    with pytest.raises(BackendTimeoutError) as caught:
        hosted.call("block", 60, timeout_s=2)
    message = str(caught.value)
    assert "the engine: block had no answer" in message
    assert "within 2 s" in message
    assert "in block" in message, "the child's stack is missing"


async def test_a_timeout_of_a_coroutine_leaves_the_child_working(hosted) -> None:
    with pytest.raises(BackendTimeoutError, match="wait had no answer"):
        await hosted.acall("wait", "late", timeout_s=1.0)
    assert await cancelled_there(hosted) == ["late"]


def test_a_child_that_does_not_start_says_why(make, tmp_path) -> None:
    with pytest.raises(HostedCallError, match="the engine: start failed: ValueError: no such model"):
        make(fault="raise").start(timeout_s=60)
    with pytest.raises(HostedProcessLostError, match=r"start failed: .*exited with code 3(.|\n)*the engine gives up"):
        make(fault="exit").start(timeout_s=60)
    missing = str(tmp_path / "python")
    with pytest.raises(BackendError, match=f"interpreter '{missing}' cannot be run"):
        make(python=missing).start(timeout_s=60)


@pytest.mark.slow
def test_a_start_that_takes_too_long_says_what_it_was_doing(make) -> None:
    process = make(fault="sleep")
    with pytest.raises(BackendTimeoutError, match=r"start had no answer(.|\n)*in __init__"):
        process.start(timeout_s=5)
    assert not is_alive(process.pid)


def test_variables_are_set_and_unset_for_the_child_alone(make, monkeypatch) -> None:
    monkeypatch.setenv("HOSTED_OLD", "1")
    process = make(environment={"HOSTED_NEW": "2", "HOSTED_OLD": None})
    process.start(timeout_s=60)
    assert process.call("environment", "HOSTED_NEW", timeout_s=60) == "2"
    assert process.call("environment", "HOSTED_OLD", timeout_s=60) is None
    assert os.environ["HOSTED_OLD"] == "1"
    assert "HOSTED_NEW" not in os.environ


def test_what_it_prints_is_kept_up_to_a_bound(hosted) -> None:
    hosted.call("noise", "chatter", count=100_000, timeout_s=60)
    hosted.call("noise", "the end", timeout_s=60)
    hosted.close()
    assert hosted.last_output(2) == "  | chatter\n  | the end"


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("end", ["close", "death"])
def test_nothing_that_the_engine_started_outlives_it(hosted, end, deaf) -> None:
    grandchildren = [hosted.call("spawn", deaf=deaf, timeout_s=60), hosted.call("spawn", group=True, timeout_s=60)]
    assert all(map(is_alive, grandchildren))
    if end == "close":
        hosted.close()
        hosted.close()
    else:
        os.kill(hosted.pid, signal.SIGKILL)
    for pid in (hosted.pid, *grandchildren):
        await_end(pid)


@pytest.mark.parametrize("end", ["close", "death", "death of the parent"])
def test_nothing_that_the_engine_mapped_keeps_its_name(hosted, end) -> None:
    theirs, shared, semaphore = hosted.call("map_files", timeout_s=60)
    assert Path(semaphore).exists()
    hosted._shared_files = (
        set() if end == "close" else {theirs, shared, semaphore}
    )  # as if they had been there at the start
    with Path(shared).open("r+b") as file, mmap.mmap(file.fileno(), 0):
        if end == "close":
            hosted.close()
        elif end == "death":
            os.kill(hosted.pid, signal.SIGKILL)
            hosted._reaper.join()
        else:
            hosted._link.stop()  # what closing our end of the connection looks like from there
            await_end(hosted.pid)
        assert not Path(theirs).exists()
        assert not Path(semaphore).exists()
        assert Path(shared).exists(), "another process maps it"
    Path(shared).unlink()


@pytest.mark.slow
def test_an_engine_that_dies_while_it_starts_leaves_no_names(make, monkeypatch) -> None:
    monkeypatch.setattr("chatlearn_hosting.process.RECORD_INTERVAL_S", 0.02)
    process = make("map_and_die", seconds=3.0)
    with pytest.raises(HostedProcessLostError, match="exited with code 5") as caught:
        process.start(timeout_s=60)
    name = str(caught.value).rpartition("| mapped ")[2].split()[0]
    process._reaper.join()
    assert name.startswith("/dev/shm/")
    assert not Path(name).exists()


def test_giving_up_a_process_leaves_its_exit_status_to_the_reaper(make, monkeypatch) -> None:
    """It may have ended by itself at that moment."""
    waitid, may_wait = os.waitid, threading.Event()

    def late(*args):
        assert may_wait.wait(60)
        return waitid(*args)

    monkeypatch.setattr(os, "waitid", late)
    hosted = make()
    hosted.start(timeout_s=60)
    answer = hosted.begin("hang", 60)
    try:
        os.kill(hosted.pid, signal.SIGKILL)
        waitid(os.P_PID, hosted.pid, os.WEXITED | os.WNOWAIT)
        hosted._kill_hung_child("it does nothing")
        assert waitid(os.P_PID, hosted.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
    finally:
        may_wait.set()
    with pytest.raises(HostedProcessLostError, match="it does nothing"):
        answer.result(60)


def test_an_end_reaped_by_other_code_fails_calls_too(make, monkeypatch) -> None:
    waitid = os.waitid

    def waited_for(kind, pid, options):
        os.waitpid(pid, 0)
        return waitid(kind, pid, options)

    monkeypatch.setattr(os, "waitid", waited_for)
    hosted = make()
    hosted.start(timeout_s=60)
    answer = hosted.begin("hang", 60)
    os.kill(hosted.pid, signal.SIGKILL)
    with pytest.raises(HostedProcessLostError, match="has ended, but other code in this process reaped its exit"):
        answer.result(15)


def test_a_closed_process_lets_its_object_close_first(make, tmp_path) -> None:
    process = make("Polite", path=str(tmp_path / "log"))
    process.start(timeout_s=60)
    process.close()
    assert (tmp_path / "log").read_text() == "closed"
    assert process.lost == "it was closed"
    with pytest.raises(HostedProcessLostError, match="the engine: greet failed: it was closed"):
        process.call("greet", timeout_s=60)


async def test_closing_fails_open_calls(hosted) -> None:
    call = asyncio.ensure_future(hosted.acall("wait", "x"))
    await asyncio.sleep(0)
    await hosted.acall("greet")
    hosted.close()
    with pytest.raises(HostedProcessLostError, match="wait failed: it was closed"):
        await call


def test_closing_what_never_started_is_fine(make) -> None:
    make().close()


@pytest.mark.slow
def test_a_killed_parent_takes_the_child_and_its_group_along(package, tmp_path) -> None:
    script = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(package.parent)!r})
        from chatlearn_hosting import HostedProcess
        process = HostedProcess("x", package="hosted_example", factory="hosted_example.target:Target", arguments={{}})
        process.start(60)
        print(process.pid, process.call("spawn", deaf=True, timeout_s=60), flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await_end(child)
    await_end(grandchild)
    assert live_members(child) == []
