"""Timeouts over a clock that a test moves: what counts is the time that is not paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from chatlearn_runtime_kit.pausable_timeouts import PausableTimeouts

Pass = Callable[[float], "asyncio.Future[None]"]


@pytest.fixture
async def pass_s(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Lets seconds pass on the event loop's clock, in no time."""
    loop, now = asyncio.get_running_loop(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])

    async def move(seconds: float) -> None:
        now[0] += seconds
        for _ in range(5):
            await asyncio.sleep(0)

    return lambda seconds: asyncio.ensure_future(move(seconds))


async def wait_for_ever(timeouts: PausableTimeouts, seconds: float) -> str:
    try:
        async with timeouts.limit(seconds) as limit:
            await asyncio.Event().wait()
    except TimeoutError:
        return "ours" if limit.expired() else "another's"
    return "never"


async def test_without_a_pause_it_is_a_timeout(pass_s: Pass) -> None:
    waiting = asyncio.create_task(wait_for_ever(PausableTimeouts(), 10.0))
    await pass_s(9.0)
    assert not waiting.done()
    await pass_s(1.1)
    assert waiting.result() == "ours"


async def test_time_that_is_paused_does_not_count(pass_s: Pass) -> None:
    timeouts = PausableTimeouts()
    waiting = asyncio.create_task(wait_for_ever(timeouts, 10.0))
    for _ in range(3):
        await pass_s(3.0)
        timeouts.pause()
        timeouts.pause()
        await pass_s(1000.0)
        timeouts.resume()
    await pass_s(0.9)
    assert not waiting.done(), "9.9 of 10 seconds"
    await pass_s(0.2)
    assert waiting.result() == "ours"


async def test_one_that_begins_in_a_pause_has_all_of_its_time_after_it(pass_s: Pass) -> None:
    timeouts = PausableTimeouts()
    timeouts.pause()
    waiting = asyncio.create_task(wait_for_ever(timeouts, 10.0))
    await pass_s(1000.0)
    timeouts.resume()
    timeouts.resume()
    await pass_s(9.9)
    assert not waiting.done()
    await pass_s(0.2)
    assert waiting.result() == "ours"


async def test_one_that_is_over_when_the_pause_begins_ends_all_the_same(pass_s: Pass) -> None:
    timeouts = PausableTimeouts()
    waiting = asyncio.create_task(wait_for_ever(timeouts, 10.0))
    await pass_s(10.5)
    timeouts.pause()
    assert waiting.result() == "ours"


async def test_what_ends_in_time_leaves_nothing_behind(pass_s: Pass) -> None:
    timeouts = PausableTimeouts()
    async with timeouts.limit(10.0) as limit:
        await pass_s(1.0)
    assert not limit.expired()
    with pytest.raises(TimeoutError, match="of the engine"):
        async with timeouts.limit(10.0) as limit:
            raise TimeoutError("of the engine")
    assert not limit.expired(), "not ours"
    timeouts.pause()
    timeouts.resume()
