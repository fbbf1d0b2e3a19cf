"""What the command line writes for people: text that a terminal obeys in nothing, to streams that may fail.

A log on a full disk or a terminal that was closed must not end a run whose files are elsewhere.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import typer

from chatlearn_core.printable import printable


class TolerantStream:
    """A text stream whose writes may fail: what cannot be shown is not. Otherwise it is the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it was closed
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def tell(text: str) -> None:
    """Print to stderr, if it can be written to."""
    with suppress(OSError, ValueError):
        typer.echo(printable(text), err=True)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does (``sys.excepthook``), the text of others in it made printable."""
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def prepare_streams() -> None:
    """For this process: no text fails for its characters, log records and tracebacks are printable."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    sys.excepthook = show_traceback


def finish_streams() -> None:
    """Write what is buffered. A stream that takes no more is replaced, or the interpreter would fail as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
