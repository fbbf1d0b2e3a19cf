"""A limit ends what hangs and names the place; timers of others are left as they were."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from chatlearn_testing.time_limit import time_limit


class TooLateError(Exception):
    pass


def fail(reason: str) -> None:
    raise TooLateError(reason)


@pytest.fixture(autouse=True)
def no_other_timer():
    """pytest-timeout's timer is set aside."""
    delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.setitimer(signal.ITIMER_REAL, delay, interval)


@pytest.mark.parametrize(
    "hang",
    [
        lambda: time.sleep(30),
        lambda: asyncio.run(asyncio.sleep(30)),
        threading.Event().wait,
        lambda: [0 for _ in iter(int, 1)],
    ],
    ids=["sleep", "loop", "event", "busy"],
)
def test_what_hangs_ends_and_the_place_is_named(hang) -> None:
    before = signal.getsignal(signal.SIGALRM)
    place = r"did not end within 0\.05 s; it was in .*test_time_limit\.py, line \d+"
    with pytest.raises(TooLateError, match=place), time_limit(0.05, fail):
        hang()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_timer_that_expires_later_goes_on_and_an_earlier_one_counts() -> None:
    signal.setitimer(signal.ITIMER_REAL, 100.0, 7.0)
    with time_limit(5.0, fail):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 5.0
    delay, interval = signal.getitimer(signal.ITIMER_REAL)
    assert 5.0 < delay <= 100.0
    assert interval == 7.0
    with time_limit(200.0, fail):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0


def test_without_a_limit_and_in_other_threads_nothing_is_set() -> None:
    def run(limit_s: float) -> None:
        with time_limit(limit_s, fail):
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    run(0.0)
    threads = [threading.Thread(target=run, args=(5.0,))]
    for thread in threads:
        thread.start()
        thread.join()
