from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatlearn_hosting.fork_server import ForkServer
from chatlearn_testing.leftovers import wait_until_empty
from chatlearn_testing.processes import descendants, is_alive

FUNCTIONS = """
import os, signal, sys, time

LOADED_IN = os.getpid()

def say(*words):
    print(*words, LOADED_IN, os.getpid(), os.environ["GREETING"])
    print("aside", file=sys.stderr)

def fail():
    raise KeyError("no such thing")

def leave(code):
    sys.exit(int(code))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def sleep():
    time.sleep(600)

def answer(descriptors):
    for number in descriptors:
        os.write(number, b"it is me")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "forked_functions.py").write_text(FUNCTIONS)
    with ForkServer("forked_functions", path=[str(folder)], environment={"GREETING": "hello"}) as server:
        yield server


def test_each_call_is_a_process_that_finds_the_modules_loaded(server: ForkServer, capfd: pytest.CaptureFixture) -> None:
    started = [server.start("forked_functions:say", "a", "b") for _ in range(2)]
    assert [process.wait(10.0) for process in started] == [0, 0]
    output = capfd.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert [line[:2] + line[-1:] for line in lines] == [["a", "b", "hello"]] * 2
    assert {line[2] for line in lines} == {str(server._process.pid)}
    assert {int(line[3]) for line in lines} == {process.pid for process in started}
    assert output.err == "aside\n" * 2


@pytest.mark.parametrize(("function", "code"), [("fail", 1), ("die", -signal.SIGKILL), ("no_such_name", 1)])
def test_the_exit_code_says_how_it_ended(server: ForkServer, function: str, code: int, capfd: object) -> None:
    assert server.start(f"forked_functions:{function}").wait(10.0) == code


def test_an_error_is_told_on_stderr(server: ForkServer, capfd: pytest.CaptureFixture) -> None:
    server.start("forked_functions:fail").wait(10.0)
    assert "KeyError: 'no such thing'" in capfd.readouterr().err


def test_system_exit_is_an_exit_code(server: ForkServer) -> None:
    assert server.start("forked_functions:leave", "7").wait(10.0) == 7


def test_descriptors_are_passed_on(server: ForkServer) -> None:
    ours, theirs = socket.socketpair()
    process = server.start("forked_functions:answer", descriptors=[theirs.fileno()])
    theirs.close()
    assert process.wait(10.0) == 0
    assert ours.recv(100) == b"it is me"
    assert ours.recv(100) == b"", "no process holds the other end any more"
    ours.close()


def test_one_that_runs_can_be_killed(server: ForkServer) -> None:
    process = server.start("forked_functions:sleep")
    assert process.poll() is None
    assert process.pid in descendants(os.getpid())
    process.kill()
    assert process.wait(10.0) == process.poll() == -signal.SIGKILL


def test_leaving_ends_what_runs(tmp_path: Path) -> None:
    (tmp_path / "forked_functions.py").write_text(FUNCTIONS)
    with ForkServer("forked_functions", path=[str(tmp_path)]) as server:
        process = server.start("forked_functions:sleep")
    assert not wait_until_empty(lambda: [str(process.pid)] if is_alive(process.pid) else [], 10.0)
    assert process.wait(10.0) == -signal.SIGKILL


def test_a_module_that_cannot_be_imported_ends_the_server(capfd: pytest.CaptureFixture) -> None:
    with ForkServer("no_such_module") as server, pytest.raises(RuntimeError, match="has ended with exit code 1"):
        server.start("no_such_module:main")
    assert "No module named 'no_such_module'" in capfd.readouterr().err
