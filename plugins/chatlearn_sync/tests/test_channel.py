from __future__ import annotations

import threading

import pytest
import torch

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_sync.channel import Channel
from chatlearn_sync.shard_spec import whole_shard

BUCKET = (whole_shard("w", torch.zeros(2)),)


@pytest.fixture
def channel(make_plan, endpoint):
    def make(num_receivers=1, **changes):
        receivers = tuple(endpoint("generator", replica=r) for r in range(num_receivers))
        plan = make_plan({}, receivers=receivers, **changes)
        return Channel(plan, plan.senders[0]), receivers

    return make


def test_an_item_stays_until_it_is_acknowledged(channel):
    opened, (receiver,) = channel()
    assert opened.poll(receiver) is None
    opened.put(BUCKET)
    assert opened.poll(receiver) is BUCKET
    assert opened.poll(receiver) is BUCKET
    opened.acknowledge(receiver)
    assert opened.poll(receiver) is None


def test_the_next_item_waits_for_every_receiver(channel):
    opened, (first, second) = channel(2)
    opened.put(BUCKET)
    putting = threading.Thread(target=opened.put, args=("end",))
    putting.start()
    opened.acknowledge(first)
    assert opened.poll(first) is None
    assert opened.poll(second) is BUCKET
    opened.acknowledge(second)
    putting.join(10)
    assert (opened.poll(first), opened.poll(second)) == ("end", "end")


def test_a_receiver_is_woken_for_every_item_and_for_failure(channel):
    opened, (receiver,) = channel()
    woken = []
    opened.attach(receiver, lambda: woken.append(1))
    opened.put(BUCKET)
    opened.fail(RuntimeError("lost"))
    assert len(woken) == 2
    with pytest.raises(WeightSyncError, match=r"sender role 'trainer'.* failed: RuntimeError: lost"):
        opened.poll(receiver)


def test_a_receiver_whose_loop_is_closed_is_left_out(channel):
    opened, (gone, there) = channel(2)

    def closed():
        raise RuntimeError("Event loop is closed")

    opened.attach(gone, closed)
    opened.put(BUCKET)
    opened.acknowledge(there)
    opened.put("end")
    with pytest.raises(WeightSyncError, match=r"dropped role 'generator' replica 0.*Event loop is closed"):
        opened.poll(gone)
    assert opened.poll(there) == "end"


def test_a_slow_receiver_is_left_out_and_the_others_go_on(channel):
    opened, (slow, quick) = channel(2, timeout_s=0.05)
    opened.put(BUCKET)
    opened.acknowledge(quick)
    opened.put("end")
    assert opened.poll(quick) == "end"
    with pytest.raises(WeightSyncError, match=r"replica 0.*did not acknowledge a bucket within 0.05 s"):
        opened.poll(slow)
    with pytest.raises(BackendTimeoutError, match=r"replica 0 .*; role 'generator' replica 1"):
        opened.drain()


def test_a_plan_without_receivers(channel):
    opened, _ = channel(0)
    with pytest.raises(WeightSyncError, match=r"no receiver remains. The plan names no receivers."):
        opened.put(BUCKET)


def test_a_stranger_may_not_attach(channel, endpoint):
    opened, _ = channel()
    with pytest.raises(WeightSyncError, match=r"role 'generator' replica 5 .*is not among the plan's receivers"):
        opened.attach(endpoint("generator", replica=5), lambda: None)
