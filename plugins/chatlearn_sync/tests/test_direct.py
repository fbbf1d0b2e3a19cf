from __future__ import annotations

import asyncio
import os
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import WeightReceiver, WeightSender
from chatlearn_core.types import SyncOffer, WeightShard
from chatlearn_sync.direct import DirectReceiver, DirectSender
from chatlearn_sync.options import DirectOptions


@pytest.fixture
def ends(endpoint):
    def make(num_senders=1, num_receivers=1):
        senders = [DirectSender(DirectOptions(), endpoint("trainer", rank=r)) for r in range(num_senders)]
        receivers = [DirectReceiver(DirectOptions(), endpoint("generator", replica=r)) for r in range(num_receivers)]
        return senders, receivers

    return make


def test_ends_are_what_the_protocol_says(ends):
    (sender,), (receiver,) = ends()
    assert isinstance(sender, WeightSender)
    assert isinstance(receiver, WeightReceiver)


async def test_every_tensor_arrives_without_a_copy(tensors, make_plan, trainer, loader, run_sync, ends):
    senders, receivers = ends()
    load = loader()
    sent, received = await run_sync(make_plan(tensors), senders, [trainer(tensors)], receivers, [load])
    size = 32 * 8 * 4 + 8 * 8 * 2 + 8 * 4 + 4
    assert (sent, received) == (size, size)
    assert load.loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(load.loaded[name], tensor)
        assert load.same[name].data_ptr() == tensor.data_ptr()


async def test_tensors_that_require_grad_arrive_detached(make_plan, trainer, loader, run_sync, ends):
    weights = {"w": torch.nn.Parameter(torch.ones(3))}
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(weights), senders, [trainer(weights)], receivers, [load])
    assert not load.same["w"].requires_grad


async def test_all_receivers_get_the_same_memory(tensors, make_plan, trainer, loader, run_sync, ends, endpoint):
    senders, receivers = ends(num_receivers=3)
    plan = make_plan(tensors, receivers=tuple(endpoint("generator", replica=r) for r in range(3)))
    loaders = [loader() for _ in range(3)]
    results = await run_sync(plan, senders, [trainer(tensors)], receivers, loaders)
    assert len(set(results)) == 1
    for load in loaders:
        assert {n: t.data_ptr() for n, t in load.same.items()} == {n: t.data_ptr() for n, t in tensors.items()}


async def test_two_ranks_that_gather_in_one_order_do_not_wait_for_each_others_sends(
    tensors, make_plan, trainer, loader, run_sync, ends, endpoint
):
    """Every step of either stream is a collective (a barrier), so a receiver that read one rank first would hang."""
    barrier = threading.Barrier(2, timeout=10)
    many = {f"{rank}.{i}": torch.full((64,), float(i)) for i in range(6) for rank in range(2)}
    parts = [{n: t for n, t in many.items() if n.startswith(str(rank))} for rank in range(2)]
    senders, receivers = ends(num_senders=2)
    plan = make_plan(many, senders=tuple(endpoint("trainer", rank=r) for r in range(2)), bucket_bytes=3 * 256)
    trainers = [trainer(parts[r], rank=r, before=lambda name: barrier.wait()) for r in range(2)]
    load = loader()
    results = await run_sync(plan, senders, trainers, receivers, [load])
    assert results == [6 * 256, 6 * 256, 12 * 256]
    assert load.loaded.keys() == many.keys()


async def test_memory_in_flight_stays_under_the_bucket_bytes(make_plan, loader, run_sync, ends):
    """Tensors that are made for the stream are dropped once acknowledged: the live ones never exceed the bound."""
    names = [f"t{i}" for i in range(30)]
    spec = {name: torch.zeros(64) for name in names}  # 256 bytes each
    memory: list[weakref.ref[np.ndarray]] = []
    most = 0

    class Gathering:
        def weights(self, export="full_tensors"):
            nonlocal most
            for name in names:
                gathered = np.zeros(64, dtype=np.float32)
                memory.append(weakref.ref(gathered))
                tensor = torch.from_numpy(gathered)  # keeps the array alive as long as any view of the tensor lives
                del gathered
                most = max(most, sum(reference() is not None for reference in memory))
                yield WeightShard(name, (64,), ((0, 64),), 0, tensor)
                del tensor

    class Forgetful(loader):
        async def load_tensors(self, items):
            for name, tensor in items:
                self.loaded[name] = tensor.clone()
                await asyncio.sleep(0)

    senders, receivers = ends()
    load = Forgetful()
    await run_sync(make_plan(spec, bucket_bytes=9 * 256), senders, [Gathering()], receivers, [load])
    assert load.loaded.keys() == spec.keys()
    assert 3 < most <= 9  # bucket_bytes are 9 tensors; the buckets do overlap


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(2)}, "'extra' is not in the manifest"),
        ({"scale": torch.zeros(2)}, r"'scale' has shape \[2\], the manifest says \[\]"),
        ({"scale": None}, "1 of 4 tensors were not streamed: scale"),
    ],
)
async def test_a_stream_that_breaks_its_manifest_fails_both_ends(
    tensors, make_plan, trainer, loader, run_sync, ends, change, message
):
    streamed = {n: t for n, t in (tensors | change).items() if t is not None}
    senders, receivers = ends()
    sent, received = await run_sync(make_plan(tensors), senders, [trainer(streamed)], receivers, [loader()])
    for result in (sent, received):
        assert isinstance(result, WeightSyncError)
        with pytest.raises(WeightSyncError, match=message):
            raise result


async def test_a_sender_that_dies_midway_fails_the_receivers_at_once(
    tensors, make_plan, trainer, loader, run_sync, ends, endpoint
):
    def die(name):
        if name == "scale":
            raise RuntimeError("out of memory in the gather")

    senders, receivers = ends(num_receivers=2)
    plan = make_plan(tensors, receivers=tuple(endpoint("generator", replica=r) for r in range(2)), timeout_s=1e6)
    sent, *received = await run_sync(plan, senders, [trainer(tensors, before=die)], receivers, [loader(), loader()])
    assert isinstance(sent, RuntimeError)
    for result in received:
        assert isinstance(result, WeightSyncError)
        assert "sender role 'trainer' replica 0 rank 0" in str(result)
        assert "RuntimeError: out of memory in the gather" in str(result)


async def test_a_receiver_that_dies_midway_fails_the_sender_at_once(
    tensors, make_plan, trainer, loader, run_sync, ends
):
    def die(name):
        if name == "layer.0.bias":
            raise RuntimeError("engine is gone")

    senders, receivers = ends()
    plan = make_plan(tensors, timeout_s=1e6)
    sent, received = await run_sync(plan, senders, [trainer(tensors)], receivers, [loader(before=die)])
    assert isinstance(received, RuntimeError)
    assert isinstance(sent, WeightSyncError)
    assert "no receiver remains. role 'generator' replica 0" in str(sent)
    assert "RuntimeError: engine is gone" in str(sent)


async def test_a_receiver_that_dies_does_not_take_the_others_along(
    tensors, make_plan, trainer, loader, run_sync, ends, endpoint
):
    def die(name):
        raise RuntimeError("engine is gone")

    senders, receivers = ends(num_receivers=2)
    plan = make_plan(tensors, receivers=tuple(endpoint("generator", replica=r) for r in range(2)))
    loaders = [loader(before=die), loader()]
    sent, first, second = await run_sync(plan, senders, [trainer(tensors)], receivers, loaders)
    assert isinstance(first, RuntimeError)
    assert sent == second
    assert loaders[1].loaded.keys() == tensors.keys()


async def test_a_receiver_that_never_comes_is_named(tensors, make_plan, trainer, ends):
    (sender,), _ = ends()
    plan = make_plan(tensors, timeout_s=0.05)
    sender.offer(plan)
    with pytest.raises(BackendTimeoutError, match=r"sender role 'trainer'.*waited for receivers\. role 'generator'"):
        await asyncio.to_thread(sender.send, plan, trainer(tensors))


async def test_a_sender_that_never_sends_is_named(tensors, make_plan, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors, timeout_s=0.05)
    with pytest.raises(BackendTimeoutError, match=r"waited 0.05 s .* for sender ranks \[0\] of role 'trainer'"):
        await receiver.receive(plan, [sender.offer(plan)], loader())


async def test_the_event_loop_stays_free_while_waiting(tensors, make_plan, trainer, loader, run_sync, ends):
    gate, ticks = threading.Event(), 0

    async def tick():
        nonlocal ticks
        while ticks < 5:
            ticks += 1
            await asyncio.sleep(0)
        gate.set()

    senders, receivers = ends()
    slow = trainer(tensors, before=lambda name: gate.wait(10))
    results, _ = await asyncio.gather(run_sync(make_plan(tensors), senders, [slow], receivers, [loader()]), tick())
    assert results[0] == results[1]
    assert ticks == 5


async def test_release_unblocks_a_send_nobody_reads(tensors, make_plan, trainer, ends):
    (sender,), _ = ends()
    plan = make_plan(tensors, timeout_s=1e6)
    sender.offer(plan)
    blocked = asyncio.create_task(asyncio.to_thread(sender.send, plan, trainer(tensors)))
    await asyncio.sleep(0.01)
    sender.release(plan)
    with pytest.raises(WeightSyncError, match=r"the sync was released|without an open offer"):
        await blocked


async def test_a_cancelled_receiver_lets_the_sender_go(tensors, make_plan, trainer, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors, timeout_s=1e6)
    receiving = asyncio.create_task(receiver.receive(plan, [sender.offer(plan)], loader()))
    await asyncio.sleep(0)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    with pytest.raises(WeightSyncError, match=r"no receiver remains.*CancelledError"):
        await asyncio.to_thread(sender.send, plan, trainer(tensors))


async def test_versions_follow_each_other(tensors, make_plan, trainer, loader, run_sync, ends):
    senders, receivers = ends()
    load = loader()
    for version in (1, 2, 3):
        new = {n: torch.full_like(t, version) for n, t in tensors.items()}
        plan = make_plan(new, sync_id=f"sync-{version}", policy_version=version)
        await run_sync(plan, senders, [trainer(new)], receivers, [load])
        assert all(torch.equal(load.loaded[name], new[name]) for name in new)


def test_another_process_is_refused_with_the_remedy(tensors, make_plan, ends, endpoint):
    (sender,), _ = ends()
    plan = make_plan(tensors, receivers=(endpoint("generator", process=os.getpid() + 1),))
    with pytest.raises(WeightSyncError, match=r"do not share a process; set weight_sync.backend to .*'checkpoint'"):
        sender.offer(plan)


async def test_an_offer_that_was_carried_to_another_process_is_refused(tensors, make_plan, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors)
    carried = pickle.loads(pickle.dumps(sender.offer(plan).content))
    with pytest.raises(WeightSyncError, match="do not share a process"):
        await receiver.receive(plan, [SyncOffer(0, carried)], loader())
    with pytest.raises(WeightSyncError, match="offered a str, which is not an offer of 'direct'"):
        await receiver.receive(plan, [SyncOffer(0, "a path")], loader())


async def test_an_offer_of_another_sync_is_refused(tensors, make_plan, loader, ends):
    (sender,), (receiver,) = ends()
    offer = sender.offer(make_plan(tensors))
    with pytest.raises(WeightSyncError, match=r"'sync-2'.*offered sync 'sync-1'"):
        await receiver.receive(make_plan(tensors, sync_id="sync-2"), [offer], loader())


def test_send_needs_an_offer_and_close_twice_is_fine(tensors, make_plan, trainer, ends):
    (sender,), (receiver,) = ends()
    with pytest.raises(WeightSyncError, match="without an open offer"):
        sender.send(make_plan(tensors), trainer(tensors))
    for end in (sender, receiver):
        end.close()
        end.close()
