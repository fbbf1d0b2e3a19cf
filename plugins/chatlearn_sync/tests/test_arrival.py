from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from chatlearn_hosting.engine_side.groups import SenderGroup, join
from chatlearn_sync.arrival import GLANCE_S, Arrival


@pytest.fixture
def both_ends():
    """(sender, receiver) of a gloo group in this process."""
    made = []

    def make(timeout_s=20.0):
        limit = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        receivers = []
        address = f"127.0.0.1:{store.port}"
        meeting = threading.Thread(target=lambda: receivers.append(join(address, "g", "gloo", 2, 1, timeout_s)))
        meeting.start()
        sender = SenderGroup(store, "g", "gloo", 2, 0, timeout_s)
        meeting.join()
        made.extend([sender, *receivers, store])
        return sender, receivers[0]

    yield make
    for one in made:
        if isinstance(one, SenderGroup):
            one.close()


def test_it_tells_when_it_is_over_and_not_before(both_ends):
    sender, receiver = both_ends()
    told = threading.Event()
    target = torch.zeros(1000)
    arrival = Arrival(receiver, target, told.set)
    assert arrival.glance_s is None
    assert not told.wait(0.05)
    assert not arrival.is_over, "no sender has sent anything"
    Arrival(sender, torch.arange(1000.0), lambda: None).wait()
    assert told.wait(10)
    assert arrival.is_over
    arrival.wait()
    assert torch.equal(target, torch.arange(1000.0))


def test_it_tells_also_when_it_breaks_off(both_ends):
    _, receiver = both_ends(timeout_s=0.5)
    told = threading.Event()
    arrival = Arrival(receiver, torch.zeros(10), told.set)
    assert told.wait(10)
    assert arrival.is_over
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        arrival.wait()


def test_where_nobody_says_when_it_is_over_it_is_looked_at():
    """NCCL's future is done as soon as the broadcast is in its stream."""
    work = SimpleNamespace(is_completed=lambda: completed.is_set(), wait=lambda: None)
    completed, told = threading.Event(), threading.Event()
    arrival = Arrival(SimpleNamespace(says_when_over=False, broadcast=lambda _: work), torch.zeros(1), told.set)
    assert told.is_set(), "the waiting receiver begins to look"
    assert arrival.glance_s == GLANCE_S
    assert not arrival.is_over
    completed.set()
    assert arrival.is_over
