from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_rewards.process_pool import ProcessPool, Task

TASKS = """
import os, sys, time

def build(**arguments):
    def call(payload):
        kind, value = payload
        if kind == "sleep":
            time.sleep(value)
        if kind == "die":
            os._exit(1)
        if kind == "child":
            import subprocess
            open(value, "w").write(str(subprocess.Popen(["sleep", "1000"]).pid))
            time.sleep(1000)
        if kind == "allocate":
            bytearray(value)
        if kind == "modules":
            return sorted(m for m in ("torch", "numpy", "chatlearn_core", "asyncio") if m in sys.modules)
        if kind == "pid":
            return os.getpid()
        return value
    return call
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "pool_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    opened = []

    def make(start=True, **options):
        pool = ProcessPool(
            Task("pool_tasks:build"), name="the pool", **{"timeout_s": 10.0, "num_workers": 2, **options}
        )
        opened.append(pool)
        if start:
            pool.start()
        return pool

    yield make
    for pool in opened:
        pool.close()


def gone(process_id: int) -> bool:
    """Not there, or dead and not yet reaped by init."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(holds) -> None:
    """Wait for something that another process does; the test's own timeout is the limit."""
    while not holds():
        await asyncio.sleep(0.02)


async def test_results_come_in_order(pool):
    outcomes = await pool().run([("echo", n) for n in range(300)])
    assert [o.value for o in outcomes] == list(range(300))


async def test_concurrent_runs_do_not_mix(pool):
    shared = pool()
    runs = await asyncio.gather(*(shared.run([("echo", (r, n)) for n in range(20)]) for r in range(20)))
    assert [[tuple(o.value) for o in run] for run in runs] == [[(r, n) for n in range(20)] for r in range(20)]


async def test_the_event_loop_stays_free(pool):
    shared, ticks = pool(), 0
    running = asyncio.create_task(shared.run([("sleep", 1.0)]))
    while not running.done():
        ticks += 1
        await asyncio.sleep(0.001)
    assert ticks > 5


async def test_workers_import_nothing_heavy(pool):
    (outcome,) = await pool().run([("modules", None)])
    assert outcome.value == []


async def test_a_dying_worker_costs_one_item_and_is_replaced(pool):
    shared = pool(num_workers=1)
    before = shared.process_ids
    outcomes = await shared.run([("echo", 1), ("die", 0), ("echo", 2), ("die", 0), ("echo", 3)])
    assert [o.value for o in outcomes] == [1, None, 2, None, 3]
    assert "exit status 1" in outcomes[1].error
    await until(lambda: shared.process_ids)
    assert shared.process_ids != before
    assert all(gone(process_id) for process_id in before)


async def test_a_worker_killed_while_idle_costs_nothing(pool):
    shared = pool(num_workers=1)
    (process_id,) = shared.process_ids
    os.kill(process_id, signal.SIGKILL)
    await until(lambda: gone(process_id))
    assert [o.value for o in await shared.run([("echo", 1), ("echo", 2)])] == [1, 2]


async def test_what_a_hanging_item_started_dies_with_it(pool, tmp_path):
    shared = pool(num_workers=1, timeout_s=3.0)  # starting a child takes a moment
    (outcome,) = await shared.run([("child", str(tmp_path / "pid"))])
    assert "timed out" in outcome.error
    child = int((tmp_path / "pid").read_text())
    await until(lambda: gone(child))


async def test_timeouts_of_single_items(pool):
    outcomes = await pool(num_workers=1).run([("sleep", 1000), ("sleep", 0.01)], [0.2, 5.0])
    assert outcomes[0].error == "timed out after 0.2 s; its worker process was killed"
    assert outcomes[1].value == 0.01


async def test_memory_of_a_worker_is_bounded(pool):
    outcomes = await pool(num_workers=1, memory_mb=512).run([("allocate", 1 << 30), ("echo", 1)])
    assert "MemoryError" in outcomes[0].error
    assert outcomes[1].value == 1


async def test_cancelled_work_is_dropped(pool):
    """Queued items are never begun, and neither is what the worker already holds; their time limit is out of reach."""
    shared = pool(num_workers=1, timeout_s=1e6)
    running = asyncio.create_task(shared.run([("sleep", 0.2)] + [("sleep", 1000)] * 3))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [o.value for o in await shared.run([("echo", 1)])] == [1]


async def test_close_ends_what_runs_and_leaves_no_process(pool):
    shared = pool()
    process_ids = shared.process_ids
    running = asyncio.create_task(shared.run([("sleep", 1000)] * 5))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(shared.close)
    assert {o.error for o in await running} == {"the process pool was closed"}
    assert all(gone(process_id) for process_id in process_ids)
    assert shared.process_ids == []
    assert "closed" in shared.health()
    with pytest.raises(BackendError, match="the pool: its process pool is closed"):
        await shared.run([("echo", 1)])
    shared.close()


async def test_a_pool_is_started_first(pool):
    with pytest.raises(BackendError, match="its process pool is not started"):
        await pool(start=False).run([("echo", 1)])


def test_one_pool_serves_several_event_loops(pool):
    shared = pool()
    for n in range(2):
        assert [o.value for o in asyncio.run(shared.run([("echo", n)]))] == [n]


@pytest.mark.parametrize("work", ["time.sleep(1000)", "re.match('(a+)+b', 'a' * 60)"])
async def test_a_parent_killed_by_sigkill_leaves_no_orphan(tmp_path, work):
    """Also while the worker is inside C code that never gives the interpreter lock back."""
    (tmp_path / "endless.py").write_text(f"import re, time\ndef build():\n    return lambda payload: {work}\n")
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(tmp_path)!r})
            from chatlearn_rewards.process_pool import ProcessPool, Task
            async def main():
                pool = ProcessPool(Task("endless:build"), name="p", timeout_s=1000, num_workers=2)
                pool.start()
                running = asyncio.create_task(pool.run([0, 0]))
                while len(pool.process_ids) < 2:
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.3)
                print(*pool.process_ids, flush=True)
                await running
            asyncio.run(main())
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(word) for word in (await asyncio.to_thread(process.stdout.readline)).split()]
    assert len(workers) == 2
    assert not any(gone(worker) for worker in workers)
    process.kill()
    process.wait()
    process.stdout.close()
    await until(lambda: all(gone(worker) for worker in workers))


def test_a_machine_that_starts_no_worker_is_told(tmp_path, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("chatlearn_rewards.worker_process.socket.socketpair", refuse)
    pool = ProcessPool(Task("pool_tasks:build"), name="the pool", timeout_s=1, num_workers=2)
    with pytest.raises(BackendError, match=r"the pool: no worker process can start: .*Too many open files"):
        pool.start()


def test_no_start_takes_for_ever(tmp_path, monkeypatch):
    (tmp_path / "slow_task.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = ProcessPool(Task("slow_task:build"), name="the pool", timeout_s=1, num_workers=1, start_timeout_s=0.3)
    with pytest.raises(BackendError, match=r"the pool: a worker process was not ready after 0.3 s"):
        pool.start()
