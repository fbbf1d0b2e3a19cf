"""Text of others is shown and obeyed in nothing, and a stream that fails ends nothing."""

from __future__ import annotations

import errno
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.console import Console

from chatlearn_cli.progress_bar import ProgressBar
from chatlearn_cli.terminal import TolerantStream

HOSTILE = "\x1b[31mred\x07 half \ud800 [bold]"
SHOWN = "\\x1b[31mred\\x07 half \\ud800 [bold]"

FAILING = """
import logging, sys
from chatlearn_cli import lazy, main
from chatlearn_core.exceptions import ConfigError

def evaluate():
    logging.getLogger("a plugin").warning("logged %s", {text!r})
    print({text!r})
    raise {error}({text!r})

lazy.load_callable = lambda record, attribute, origin: evaluate
main.main(["eval"])
"""


def run(error: str, stderr: str | None = None) -> subprocess.CompletedProcess[str]:
    program = FAILING.format(text=HOSTILE, error=error)
    command = [sys.executable, "-c", program]
    if stderr is None:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    with Path(stderr).open("w") as stream:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stream, text=True, check=False)


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("RuntimeError", 1)])
def test_nothing_that_others_say_reaches_the_terminal_as_it_is(error: str, code: int) -> None:
    finished = run(error)
    assert finished.returncode == code
    assert "\x1b" not in finished.stderr
    assert f"logged {SHOWN}\n" in finished.stderr
    assert f"{'error' if code == 2 else 'RuntimeError'}: {SHOWN}\n" in finished.stderr
    assert ("Traceback" in finished.stderr) is (code == 1)
    assert "half \\ud800" in finished.stdout, "it can be printed"


@pytest.mark.parametrize(("error", "code"), [("ConfigError", 2), ("RuntimeError", 1)])
def test_the_exit_code_does_not_depend_on_a_full_disk_under_the_log(error: str, code: int) -> None:
    assert run(error, "/dev/full").returncode == code


def test_messages_of_a_run_are_printable() -> None:
    stream = StringIO()
    bar = ProgressBar(console=Console(file=stream, width=200))
    bar.message(HOSTILE)
    bar.warning(HOSTILE)
    assert stream.getvalue() == f"{SHOWN}\nwarning: {SHOWN}\n"


class FullDisk(StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        self.write("")


def test_a_run_goes_on_where_its_log_cannot_be_written() -> None:
    stream = TolerantStream(FullDisk())
    with ProgressBar(console=Console(file=cast(TextIO, stream))) as bar:
        bar.started(Path("run"), 2, 1)
        bar.message("more")
        bar.step_done(2, {"perf/throughput": 1.0})
    assert stream.write("text") == 4
    assert stream.isatty() is False, "otherwise it is the stream"
