"""A time limit for third-party Python code, in any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_IDLE_S = 1.0
"""The watching thread ends after this many seconds without calls."""


class TooSlowError(Exception):
    """The code did not end in time and was stopped."""


class _Ended(BaseException):
    """Raised inside code that is too slow; the code's ``except Exception`` does not catch it."""


class Deadline:
    """Stops calls that take too long: loops of Python code, but not a single call into a C library that does not
    return.

    One thread watches all calls, so that a call costs microseconds. Signals are unsuitable: they reach only the main
    thread, and belong to the application. Only one call at a time.

    Args:
        seconds: longest time of one call.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._changed = threading.Condition()
        self._due: float | None = None
        self._caller = 0
        self._fired = False
        self._watching = False

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` and return its result; its exceptions pass through.

        Raises:
            TooSlowError: the call was stopped.
        """
        self._arm()
        try:
            try:
                return function()
            finally:
                self._disarm()
        except _Ended:
            self._disarm()
            raise TooSlowError(f"did not end within {self.seconds:g} s") from None

    def _arm(self) -> None:
        with self._changed:
            self._caller, self._due = threading.get_ident(), time.monotonic() + self.seconds
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="deadline", daemon=True).start()

    def _disarm(self) -> None:
        with self._changed:
            self._due = None
            if self._fired:  # cancel an exception that came too late, so that it is not raised elsewhere
                _raise_in(self._caller, None)
                self._fired = False

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                now = time.monotonic()
                if self._due is not None:
                    idle_since = now
                    if now >= self._due:
                        self._due, self._fired = None, True
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(self._caller), ctypes.py_object(_Ended)
                        )
                elif now - idle_since > _IDLE_S:
                    self._watching = False
                    return
                self._changed.wait(min(1.0, self.seconds / 4))


def _raise_in(thread: int, kind: ctypes.py_object[type[BaseException]] | None) -> None:
    """Raise an exception in a thread at its next step in Python code; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)
