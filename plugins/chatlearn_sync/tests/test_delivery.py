"""Delivery of boxes to a loader that accepts only whole tensors."""

from __future__ import annotations

import asyncio

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightShard
from chatlearn_sync import delivery
from chatlearn_sync.delivery import Assembly, Delivery
from chatlearn_sync.shard_spec import whole_shard

NUM_TENSORS, ROWS, TENSOR_BYTES = 12, 8, 8 * 4 * 4


def rows_of(tensors, rank, num_ranks):
    """What one of several ranks holds of each tensor."""
    for name, tensor in tensors.items():
        start, stop = ROWS * rank // num_ranks, ROWS * (rank + 1) // num_ranks
        yield WeightShard(name, tuple(tensor.shape), ((start, stop), (0, 4)), rank, tensor[start:stop].clone())


@pytest.fixture
def matrices():
    return {f"t{i}": torch.randn(ROWS, 4) for i in range(NUM_TENSORS)}


def make(make_plan, loader, tensors, awaited, **changes):
    plan = make_plan(tensors, export="boxes", **{"channel": "tensors", **changes})
    return Delivery(plan, loader, awaited)


async def send(way, shards, rank, sent, pause=0.0):
    for shard in shards:
        await way.load(iter([shard]), rank)
        sent.append((rank, shard.name))
        await asyncio.sleep(pause)


async def test_a_fast_sender_waits_for_a_slow_one(matrices, make_plan, loader):
    """Two tensors' room: the fast rank is never more than two tensors ahead, and all arrive whole."""
    load, sent, over = loader(), [], set()
    way = make(make_plan, load, matrices, lambda: frozenset({0, 1} - over), bucket_bytes=4 * TENSOR_BYTES)

    async def one(rank, pause):
        await send(way, rows_of(matrices, rank, 2), rank, sent, pause)
        over.add(rank)
        await way.sender_ended()

    await asyncio.gather(one(0, 0.0), one(1, 0.002))
    assert all(torch.equal(load.loaded[name], tensor) for name, tensor in matrices.items())
    assert load.loaded.keys() == matrices.keys()
    assert way._assembly.most_bytes <= 2 * TENSOR_BYTES
    assert way._assembly.held_bytes == 0


async def test_senders_in_opposite_order_do_not_wait_for_each_other_for_ever(matrices, make_plan, loader):
    """No order saves memory here: what is held exceeds the limit, and everything arrives."""
    load, sent = loader(), []
    way = make(make_plan, load, matrices, lambda: frozenset({0, 1}), bucket_bytes=4 * TENSOR_BYTES)
    backwards = list(rows_of(matrices, 1, 2))[::-1]
    async with asyncio.timeout(20):
        await asyncio.gather(send(way, rows_of(matrices, 0, 2), 0, sent), send(way, backwards, 1, sent))
    assert load.loaded.keys() == matrices.keys()
    assert way._assembly.most_bytes > 2 * TENSOR_BYTES


async def test_a_sender_that_ended_is_not_waited_for(matrices, make_plan, loader):
    names = list(matrices)
    left, right = ({name: matrices[name] for name in part} for part in (names[:3], names))
    awaited = {0, 1}
    way = make(make_plan, loader(), matrices, lambda: frozenset(awaited), bucket_bytes=2 * TENSOR_BYTES)
    await send(way, list(rows_of(left, 0, 2))[:1], 0, [])
    waiting = asyncio.create_task(send(way, list(rows_of(right, 1, 2))[1:], 1, []))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    awaited.discard(0)
    await way.sender_ended()
    async with asyncio.timeout(delivery.STALL_S / 2):
        await waiting


async def test_nothing_is_held_up_for_long(matrices, make_plan, loader, monkeypatch):
    """Another receiver may hold up the sender that has the rest: then memory gives way."""
    monkeypatch.setattr(delivery, "STALL_S", 0.05)
    way = make(make_plan, loader(), matrices, lambda: frozenset({0, 1}), bucket_bytes=2 * TENSOR_BYTES)
    async with asyncio.timeout(10):
        await send(way, rows_of(matrices, 0, 2), 0, [])
    assert way._assembly.most_bytes == NUM_TENSORS * TENSOR_BYTES


async def test_a_loader_of_boxes_gets_them_as_they_are(matrices, make_plan):
    class Boxes:
        def __init__(self):
            self.taken = []

        async def load_boxes(self, shards):
            self.taken += shards

    load = Boxes()
    way = make(make_plan, load, matrices, frozenset, channel="boxes")
    shards = list(rows_of(matrices, 0, 2))
    await way.load(iter(shards), 0)
    assert load.taken == shards


async def test_whole_tensors_among_boxes_are_not_copied(matrices, make_plan, loader):
    load = loader()
    way = make(make_plan, load, matrices, frozenset)
    tensor = next(iter(matrices.values()))
    await way.load(iter([whole_shard("t0", tensor)]), 0)
    assert load.same["t0"] is tensor
    assert way._assembly.most_bytes == 0


def test_an_element_that_comes_twice_is_refused():
    assembly = Assembly(1 << 20, frozenset)
    shard = WeightShard("w", (4,), ((0, 2),), 0, torch.zeros(2))
    assembly.place(shard)
    with pytest.raises(WeightSyncError, match=r"tensor 'w': elements \[0:2\] came twice"):
        assembly.place(shard)
