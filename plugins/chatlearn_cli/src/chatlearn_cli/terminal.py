"""Output of the command line: text without control characters, written to streams that may fail.

A log on a full disk or a closed terminal must not end a run, whose files are elsewhere.
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
    """A text stream that ignores failed writes; otherwise it behaves like the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
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
    """Print a traceback as ``sys.excepthook`` does, with untrusted text made printable."""
    tell("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def prepare_streams() -> None:
    """Prepare this process: unencodable characters are escaped, log records and tracebacks are printable."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python's default for stderr
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    sys.excepthook = show_traceback


def finish_streams() -> None:
    """Flush the streams. A stream that fails is replaced, so that the interpreter does not fail as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
