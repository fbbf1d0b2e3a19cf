"""What ``/proc`` says of processes that live, have ended, or were never there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from chatlearn_testing.processes import (
    command,
    descendants,
    environment,
    is_alive,
    open_files,
    processes,
    session_members,
)


def test_a_child_is_known_while_it_lives() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"CHATLEARN_TEST_CHILD": "7"},
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert child.pid in descendants(os.getpid())
    assert child.pid in processes()
    assert "input()" in command(child.pid)
    assert environment(child.pid)["CHATLEARN_TEST_CHILD"] == "7"
    assert any(name.startswith("pipe:") for name in open_files(child.pid))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert not is_alive(child.pid)
    assert child.pid not in descendants(os.getpid())
    child.communicate()
    assert (command(child.pid), environment(child.pid), open_files(child.pid)) == ("", {}, [])


def test_members_of_a_session_are_found() -> None:
    leader = subprocess.Popen(["sh", "-c", "sleep 30 & wait"], start_new_session=True, stdout=subprocess.PIPE)
    try:
        [own] = [text for text in session_members(leader.pid) if text.startswith(f"{leader.pid}: ")]
        assert "sleep 30 & wait" in own
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.communicate()
    deadline = time.monotonic() + 10
    while session_members(leader.pid) and time.monotonic() < deadline:  # the killed sleep may not have ended yet
        time.sleep(0.05)
    assert session_members(leader.pid) == []
