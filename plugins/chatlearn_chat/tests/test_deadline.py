"""Code that does not end is ended, in any thread, and nothing of that is left behind."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from chatlearn_chat.deadline import Deadline, TooSlowError


def forever() -> None:
    while True:
        try:
            sum(range(100))
        except Exception:
            continue


def test_a_call_that_ends_gives_its_result_or_its_error() -> None:
    deadline = Deadline(60.0)
    assert [deadline.call(lambda number=number: number * 2) for number in range(3)] == [0, 2, 4]
    with pytest.raises(KeyError, match="own"):
        deadline.call(lambda: {}["own"])


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_call_that_does_not_end_is_ended(in_thread: bool) -> None:
    deadline = Deadline(0.05)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            deadline.call(forever)
        except TooSlowError as error:
            caught.append(error)
        for _ in range(1000):  # nothing comes up later
            sum(range(100))
        caught.append(deadline.call(lambda: ValueError("the next call is as any other")))

    if in_thread:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
    assert [str(error) for error in caught] == ["did not end within 0.05 s", "the next call is as any other"]


def test_calls_that_end_just_then_leave_nothing_behind() -> None:
    deadline = Deadline(0.002)
    ends: dict[str, int] = {"in time": 0, "too slow": 0}

    def count(steps: int) -> Any:
        return sum(number for number in range(steps))

    for round_ in range(300):
        try:
            deadline.call(partial(count, 200 * round_))
            ends["in time"] += 1
        except TooSlowError:
            ends["too slow"] += 1
    assert sum(ends.values()) == 300
    assert ends["in time"] > 0
