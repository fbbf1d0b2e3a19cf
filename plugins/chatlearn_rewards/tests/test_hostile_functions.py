"""Functions that fork, write where they should not, or leave things behind: every other item has its own score."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from chatlearn_rewards.process_pool import ProcessPool, Task
from chatlearn_rewards.worker_output import MAX_ITEM_BYTES

pytestmark = pytest.mark.slow  # most cases end a worker
TASKS = """
import ctypes, os, signal, subprocess, sys, threading, time

def is_socket(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False

def channels():
    return [int(n) for n in os.listdir("/proc/self/fd") if is_socket(int(n))]

class Rude(Exception):
    def __str__(self):
        raise RuntimeError("no")

def later(work):
    threading.Thread(target=lambda: (time.sleep(0.05), work()), daemon=True).start()

def build():
    def call(payload):
        kind, value = payload
        if kind == "fork_and_return":
            os.fork()
        if kind == "fork_and_raise" and os.fork() == 0:
            raise KeyError("in the child")
        if kind == "fork_and_exit" and os.fork() == 0:
            sys.exit(0)
        if kind == "fork_in_c":
            ctypes.CDLL(None).fork()
        if kind == "fork_and_answer_late" and os.fork() == 0:
            time.sleep(0.1)
        if kind == "write_to_all":
            for number in channels():
                os.write(number, b"hello")
        if kind == "write_to_all_late":
            later(lambda: [os.write(number, b"hello") for number in channels()])
        if kind == "write_a_frame":
            for number in channels():
                os.write(number, bytes(16) + (14).to_bytes(8, "big") + b'{"value": 7.5}')
        if kind == "claim_much":
            for number in channels():
                os.write(number, b"\\xff" * 24)
        if kind == "close_all":
            os.closerange(3, 256)
        if kind == "close_all_and_open":
            os.closerange(3, 256)
            for number in range(5):
                os.open(value, os.O_RDWR | os.O_CREAT)
            return 1
        if kind == "replace_all":
            null = os.open(os.devnull, os.O_RDWR)
            for number in channels():
                os.dup2(null, number)
        if kind == "do_not_block":
            for number in channels():
                os.set_blocking(number, False)
            return "x" * (8 << 20)
        if kind == "leave_an_alarm":
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        if kind == "sleep":
            time.sleep(value)
        if kind == "kill_the_keeper":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if kind == "stop_the_keeper":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(1000)
        if kind == "kill_the_group":
            os.killpg(0, signal.SIGKILL)
        if kind == "exec":
            os.execv("/bin/true", ["true"])
        if kind == "rude":
            raise Rude
        if kind == "deep":
            nested = []
            for _ in range(100000):
                nested = [nested]
            return nested
        if kind == "much":
            return "x" * (65 << 20)
        if kind == "daemon":
            code = "import os, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); "
            code += "time.sleep(999)"
            return int(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout.readline())
        if kind == "daemon_and_kill_the_keeper":
            open(value, "w").write(str(call(("daemon", None))))
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if kind == "daemon_and_die":
            open(value, "w").write(str(call(("daemon", None))))
            os._exit(5)
        if kind == "print":
            print("begin \\x1b[31m", end="")
            sys.stdout.write("x" * value)
            os.write(2, b"end")
            return "printed"
        return value
    return call
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "hostile_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    opened = []

    def make(**options):
        pool = ProcessPool(
            Task("hostile_tasks:build"), name="the pool", **{"timeout_s": 10.0, "num_workers": 1, **options}
        )
        opened.append(pool)
        pool.start()
        return pool

    yield make
    for pool in opened:
        pool.close()


def gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("fork_and_return", None),
        ("fork_and_raise", None),
        ("fork_and_exit", None),
        ("fork_in_c", None),
        ("fork_and_answer_late", None),
        ("write_to_all", "sent an invalid reply"),
        ("write_to_all_late", None),
        ("write_a_frame", "sent an invalid reply"),
        ("claim_much", "sent an invalid reply"),
        ("close_all", "closed or replaced the connection to the pool"),
        ("close_all_and_open", "closed or replaced the connection to the pool"),
        ("replace_all", "closed or replaced the connection to the pool"),
        ("do_not_block", None),
        ("leave_an_alarm", None),
        ("kill_the_keeper", "its keeper process was killed"),
        ("kill_the_group", "signal SIGKILL"),
        ("exec", "exit status 0"),
        ("rude", "Rude: (its message cannot be shown: RuntimeError)"),
        ("deep", "RecursionError"),
        ("much", "the limit is 67108864"),
    ],
)
async def test_no_score_goes_to_another_item(kind, error, pool, tmp_path):
    shared = pool()
    target = tmp_path / "target"
    batches = [
        await shared.run([("echo", n), (kind, str(target)), *(("echo", n + k) for k in range(1, 6)), ("sleep", 0.1)])
        for n in (10, 20)
    ]
    for n, outcomes in zip((10, 20), batches, strict=True):
        hostile = outcomes.pop(1)
        assert [o.value for o in outcomes] == [n, n + 1, n + 2, n + 3, n + 4, n + 5, 0.1], outcomes
        if error is None:
            assert hostile.error is None
        else:
            assert error in hostile.error
    assert not target.exists() or target.read_bytes() == b""


async def test_a_worker_that_stops_its_keeper_is_ended_in_time(pool):
    shared = pool(timeout_s=0.5)
    stopped, fine = await shared.run([("stop_the_keeper", 0), ("echo", 1)])
    assert stopped.exhausted
    assert fine.value == 1


@pytest.mark.parametrize("how", ["close", "timeout", "crash", "kill_the_keeper"])
async def test_a_process_that_left_the_session_ends_with_its_worker(how, pool, tmp_path):
    shared = pool(timeout_s=2.0)
    if how in ("crash", "kill_the_keeper"):
        kind = "daemon_and_die" if how == "crash" else "daemon_and_kill_the_keeper"
        await shared.run([(kind, str(tmp_path / "pid"))])
        daemon = int((tmp_path / "pid").read_text())
    else:
        (outcome,) = await shared.run([("daemon", None)])
        daemon = outcome.value
        assert not gone(daemon)
    if how == "close":
        shared.close()
        assert gone(daemon)
    elif how == "timeout":
        await shared.run([("sleep", 1000)], [0.1])
    await until(lambda: gone(daemon))


async def test_it_ends_also_when_the_run_is_killed(pool, tmp_path):
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(tmp_path)!r})
            from chatlearn_rewards.process_pool import ProcessPool, Task
            (open({str(tmp_path / "hostile_tasks.py")!r}, "w")).write({TASKS!r})
            pool = ProcessPool(Task("hostile_tasks:build"), name="p", timeout_s=1000, num_workers=1)
            pool.start()
            print(*[o.value for o in asyncio.run(pool.run([("daemon", None)]))], *pool.process_ids, flush=True)
            asyncio.run(pool.run([("sleep", 1000)]))
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    started = [int(word) for word in (await asyncio.to_thread(process.stdout.readline)).split()]
    assert len(started) == 2
    assert not any(gone(process_id) for process_id in started)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    await until(lambda: all(gone(process_id) for process_id in started))


async def test_what_a_function_prints_is_bounded_and_obeyed_by_no_terminal(pool, capsys):
    shared = pool()
    outcomes = await shared.run([("print", 1000), ("print", 10 << 20), ("print", 1000)])
    assert [o.value for o in outcomes] == ["printed"] * 3
    shared.close()
    shown = capsys.readouterr().err
    assert shown.count("begin \\x1b[31m") == 3
    assert "\x1b" not in shown
    assert shown.count("end") >= 2
    assert len(shown) < 2 * MAX_ITEM_BYTES
    assert "the pool: omitting the output of its workers beyond 16 KiB a sample" in shown
    assert f"the pool: {(10 << 20) + 3 + 11 - MAX_ITEM_BYTES} bytes of output of its workers were omitted" in shown
