from __future__ import annotations

import os
import subprocess
import sys

from chatlearn_hosting.process_group import end_group, live_members


def test_members_are_those_of_the_group_and_of_the_session() -> None:
    code = (
        "import os, subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "print(subprocess.Popen(sleep).pid, subprocess.Popen(sleep, process_group=0).pid, flush=True);"
        "import time; time.sleep(600)"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert leader.stdout is not None
    children = list(map(int, leader.stdout.readline().split()))
    assert sorted(live_members(leader.pid)) == sorted([leader.pid, *children])
    end_group(leader.pid, grace_s=5)
    assert live_members(leader.pid) == []
    assert leader.wait() == -15
    leader.stdout.close()


def test_a_group_of_zombies_is_empty() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert live_members(child.pid) == []
    end_group(child.pid, grace_s=5)
    assert child.wait() == 0
