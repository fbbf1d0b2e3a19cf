"""Calls a function in a new process that hashes texts otherwise, as the process of a resumed run does."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

START_S = 120.0
"""Time for a new interpreter that imports torch on a busy machine, seconds."""


def in_another_process(function: Callable[..., Any], *arguments: Any, limit_s: float = START_S) -> Any:
    """Return ``function(*arguments)``, called in a new process with another ``PYTHONHASHSEED``.

    Args:
        function: of a module that can be imported there.
        arguments: of the call; they and the result are pickled.
        limit_s: time for the process to start and answer, seconds; at least ``START_S``.

    Raises:
        AssertionError: the function raised, the process ended without an answer, or the time is over.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    seed = "1" if os.environ.get("PYTHONHASHSEED", "random") != "1" else "2"
    with mock.patch.dict(os.environ, {"PYTHONHASHSEED": seed}):
        process = context.Process(target=_call_and_send, args=(writer, function, arguments), daemon=True)
        process.start()
    writer.close()
    try:
        limit_s = max(limit_s, START_S)
        assert reader.poll(limit_s), f"another process gave no answer within {limit_s:g} s"
        try:
            raised, answer = reader.recv()
        except EOFError:
            process.join()
            raise AssertionError(f"another process ended without an answer (exit code {process.exitcode})") from None
        assert not raised, f"another process raised:\n{answer}"
        return answer
    finally:
        process.kill()
        process.join()
        reader.close()


def _call_and_send(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = (False, function(*arguments))
    except Exception:
        answer = (True, traceback.format_exc())
    writer.send(answer)
