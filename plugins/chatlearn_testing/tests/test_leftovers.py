"""The check for leftovers finds each of its kinds, and nothing that is not the test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chatlearn_testing.leftovers import (
    SHARED_MEMORY,
    Leftovers,
    outlives_tests,
)
from chatlearn_testing.listeners import tcp_ports
from chatlearn_testing.processes import processes


def watching() -> Leftovers:
    return Leftovers(wait_s=0.3)


@pytest.fixture
def block() -> Iterator[Path]:
    path = SHARED_MEMORY / f"chatlearn-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def test_nothing_is_found_where_nothing_is_left(leaves_nothing: Leftovers) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert leaves_nothing.find() == []


def test_a_process_whose_parent_has_ended_is_found() -> None:
    with pytest.raises(AssertionError, match=r"left behind: process \d+: sleep 30"), watching():
        told = subprocess.run(["sh", "-c", "sleep 30 >/dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = int(told.stdout)
    assert orphan in processes()
    os.kill(orphan, signal.SIGKILL)


def test_shared_memory_that_nobody_holds_is_found(block: Path) -> None:
    with pytest.raises(AssertionError, match=f"shared memory {block.name}"), watching():
        block.write_bytes(b"weights")


def test_shared_memory_that_another_process_holds_is_that_ones_affair(block: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys; f = open(sys.argv[1], 'wb'); print(flush=True); sys.stdin.read()", block],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    watch = watching()
    with watch:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert block.exists()
    holder.communicate()
    assert watch.find() == [f"shared memory {block.name}"]


def test_a_listening_port_is_found() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with pytest.raises(AssertionError, match=f"port {port}, listening"), watching():
        listener.listen()
    assert port in tcp_ports(os.getpid())
    listener.close()
    assert port not in tcp_ports(os.getpid())


def test_a_test_that_fails_keeps_its_own_error(block: Path) -> None:
    def fail_after(step: Callable[[], None]) -> None:
        step()
        raise KeyError("the test's own")

    with pytest.raises(KeyError), watching():
        fail_after(block.touch)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ray::IDLE", True),
        ("ray::WorkerHost.invoke", False),
        ("/usr/lib/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/x", True),
        ("python -m chatlearn_cli.main run", False),
    ],
)
def test_a_ray_that_outlives_runs_is_not_left_behind(command: str, expected: bool) -> None:
    assert outlives_tests(command) is expected
