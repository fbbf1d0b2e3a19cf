"""Processes that have not ended and do nothing: they are treated as dead. Those that work are left alone."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from chatlearn_core.exceptions import HostedProcessLostError

SILENCE_S = 0.3


@pytest.fixture
def watched(make):
    process = make(silence_s=SILENCE_S)
    process.start(timeout_s=60)
    return process


async def test_a_stopped_process_fails_every_open_call_and_is_killed(watched) -> None:
    calls = [asyncio.create_task(watched.acall("wait", name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    os.kill(watched.pid, signal.SIGSTOP)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, HostedProcessLostError)
        assert outcome.process_is_gone
        assert f"the engine: wait failed: process {watched.pid} has been stopped (SIGSTOP) for 0.3 s" in str(outcome)
    watched.close(grace_s=0)
    with pytest.raises(ProcessLookupError):
        os.kill(watched.pid, 0)


def test_a_stopped_process_that_the_engine_started_is_found(watched) -> None:
    helper = watched.call("start_helper", timeout_s=60)
    os.kill(helper, signal.SIGSTOP)
    with pytest.raises(HostedProcessLostError, match=f"process {helper}, which it started, has been stopped"):
        watched.call("block", 60.0, timeout_s=60)


def test_a_process_stopped_during_its_start_is_found(make) -> None:
    process = make(fault="stop", silence_s=SILENCE_S)
    with pytest.raises(HostedProcessLostError, match=r"start failed: process \d+ has been stopped"):
        process.start(timeout_s=60)


def test_a_process_that_hangs_without_cpu_use_is_given_up(watched) -> None:
    with pytest.raises(HostedProcessLostError, match=r"neither answered nor used a CPU for 0\.3 s"):
        watched.call("hang", 60, timeout_s=60)


def test_a_process_with_a_blocked_loop_still_answers_pings(watched) -> None:
    watched.call("block", 4 * SILENCE_S, timeout_s=60)
    assert watched.lost is None


def test_a_process_that_computes_but_cannot_answer_is_left_alone(watched) -> None:
    count = 4 * 10**7
    assert watched.call("compute", count, timeout_s=60) == count * (count - 1) // 2
