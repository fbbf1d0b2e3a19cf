from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chatlearn_hosting.engine_side.local_groups import GLOO, gloo_on_loopback

PROGRAM = """
import sys
import torch, torch.distributed as dist
from chatlearn_hosting.engine_side.local_groups import gloo_on_loopback, keep_local_stores_local
from chatlearn_hosting.reserved_port import ReservedPort
from chatlearn_testing.listeners import family, listeners
keep_local_stores_local()
keep_local_stores_local()
with ReservedPort() as port, gloo_on_loopback():
    dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[1]}:{port.number}", rank=0, world_size=1)
    group = dist.new_group([0])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print(*sorted({one.address for one in listeners(family()) if one.kind == "tcp"}))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("host", "addresses"), [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"127.0.0.1"})])
def test_an_engines_group_listens_on_loopback_alone(host, addresses) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, host], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == addresses


def test_what_the_user_set_stands(monkeypatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    with gloo_on_loopback():
        assert os.environ[GLOO] == "eth7"
    monkeypatch.delenv(GLOO)
    with gloo_on_loopback():
        assert os.environ[GLOO] == "lo"
    assert GLOO not in os.environ
