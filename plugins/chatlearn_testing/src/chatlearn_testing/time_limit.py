"""A time limit for a block of code in the main thread, synchronous calls included. Imports only light modules."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 30.0
"""A block that goes on after its limit is interrupted again after this time, seconds."""
END_S = 60.0
"""Time after the limit when a block that no signal interrupts, such as a call in C, ends the process, seconds."""


@contextmanager
def time_limit(limit_s: float, fail: Callable[[str], object]) -> Iterator[None]:
    """Call ``fail`` in the block, with the place where it is, when it takes longer than ``limit_s``.

    Does nothing outside the main thread, under a debugger, or where a timer is set that expires earlier (that of
    pytest-timeout). A timer that expires later is set again afterwards.

    Args:
        fail: raises an exception, which ends the block.
    """
    in_main = threading.current_thread() is threading.main_thread()
    earlier_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    if limit_s <= 0 or not in_main or sys.gettrace() is not None or 0 < earlier_s <= limit_s:
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        fail(f"it did not end within {limit_s:g} s; it was in {_place(frame)}")

    started = time.monotonic()
    former = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(limit_s + END_S, exit=True, file=stderr)
    try:
        yield
    finally:
        if stderr is not None:
            faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        if earlier_s:
            signal.setitimer(signal.ITIMER_REAL, max(earlier_s - (time.monotonic() - started), 0.001), interval_s)


def _place(frame: FrameType | None) -> str:
    """The innermost line outside Python's own library."""
    places = []
    while frame is not None:
        file = frame.f_code.co_filename
        places.append((file, f"{file}, line {frame.f_lineno}, in {frame.f_code.co_name}"))
        frame = frame.f_back
    own = [place for file, place in places if f"{os.sep}lib{os.sep}python" not in file and not file.startswith("<")]
    return (own or [place for _, place in places] or ["an unknown place"])[0]
