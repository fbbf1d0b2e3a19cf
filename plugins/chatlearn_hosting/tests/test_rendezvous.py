from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_hosting.rendezvous import GLOO, group_interfaces, meet
from chatlearn_hosting.reserved_port import ReservedPort

RANK = """
import sys
import torch, torch.distributed as dist
from chatlearn_hosting.rendezvous import make_default_group
from chatlearn_testing.listeners import family, listeners
rank, address, secret = int(sys.argv[1]), sys.argv[2], sys.argv[3] or None
store = make_default_group("gloo", address, rank=rank, world_size=2, secret=secret)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(total.item(), *sorted({listener.address for listener in listeners(family())}))
dist.barrier()
dist.destroy_process_group()
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["", "secret"])
def test_ranks_listen_at_the_rendezvous_address_only(secret) -> None:
    """Store, gates and gloo, of both ranks: one address with nothing behind it that the whole network reaches."""
    host = "127.0.0.1"
    with ReservedPort() as port:
        command = [sys.executable, "-c", RANK]
        address = f"tcp://{host}:{port.number}"
        # Without a setting gloo listens at the address that the host's name stands for.
        environment = {key: value for key, value in os.environ.items() if key != GLOO}
        ranks = [
            subprocess.Popen([*command, str(rank), address, secret], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(2)
        ]
        answers = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    for answer in answers:
        assert float(answer[0]) == 3.0
        assert answer[1:] == [host]


def test_gloo_s_interface_is_set_only_inside_the_context(monkeypatch) -> None:
    monkeypatch.delenv(GLOO, raising=False)
    with group_interfaces("tcp://127.0.0.1:5"):
        assert os.environ[GLOO] == "lo"
    assert GLOO not in os.environ
    with group_interfaces(None):
        assert os.environ[GLOO] == "lo"


def test_what_the_user_set_stands(monkeypatch) -> None:
    monkeypatch.setenv(GLOO, "eth7")
    with group_interfaces("tcp://127.0.0.1:5"):
        assert os.environ[GLOO] == "eth7"
    assert os.environ[GLOO] == "eth7"


@pytest.mark.parametrize("address", ["file:///tmp/x", "tcp://host", "127.0.0.1:5"])
def test_an_address_of_another_kind_is_refused(address) -> None:
    with pytest.raises(BackendError, match="must be tcp://host:port"):
        meet(address, 0, None, timedelta(seconds=1))


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(BackendError, match=r"rank 0 could not join the other ranks at tcp://192\.0\.2\.77:5"):
        meet("tcp://192.0.2.77:5", 0, None, timedelta(seconds=1))
