from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import BackendError, WeightSyncError
from chatlearn_sync import broadcast, broadcast_receiver, flat_buffers
from chatlearn_sync.broadcast import BroadcastSender, backend_of
from chatlearn_sync.broadcast_receiver import BroadcastReceiver
from chatlearn_sync.options import BroadcastOptions
from chatlearn_testing.suites.weight_sync_fixtures import KeepingLoader, StreamingTrainer

KIB = 1 << 10


@pytest.fixture
def pieces():
    """Six tensors of a kibibyte."""
    return {f"t{i}": torch.full((256,), float(i)) for i in range(6)}


@pytest.fixture
def ends(endpoint):
    made = []

    def make(num_senders=1, num_receivers=1, **options):
        chosen = BroadcastOptions(**options)
        senders = [BroadcastSender(chosen, endpoint("trainer", rank=r)) for r in range(num_senders)]
        receivers = [BroadcastReceiver(chosen, endpoint("generator", replica=r)) for r in range(num_receivers)]
        made.extend([*senders, *receivers])
        return senders, receivers

    yield make
    for one in made:
        one.close()


@pytest.fixture
def plan_for(make_plan, endpoint):
    def make(tensors, number=1, ranks=1, replicas=(0,), channel="tensors", **changes):
        return make_plan(
            tensors,
            sync_id=f"sync-{number}",
            policy_version=number,
            channel=channel,
            senders=tuple(endpoint("trainer", rank=rank) for rank in range(ranks)),
            receivers=tuple(endpoint("generator", replica=replica) for replica in replicas),
            **{"bucket_bytes": 4 * KIB} | changes,
        )

    return make


@pytest.mark.parametrize("channel", ["tensors", "process_group"])
async def test_a_group_outlives_a_sync(pieces, plan_for, run_sync, ends, channel):
    senders, receivers = ends()
    loader, groups = KeepingLoader(), []
    for number in (1, 2, 3):
        loader.loaded.clear()
        tensors = {name: tensor + number for name, tensor in pieces.items()}
        plan = plan_for(tensors, number, channel=channel)
        results = await run_sync(plan, senders, [StreamingTrainer(tensors)], receivers, [loader])
        assert results == [6 * KIB, 6 * KIB]
        assert all(torch.equal(loader.loaded[name], tensors[name]) for name in tensors)
        groups.append(senders[0]._member.group.name)
    assert len(set(groups)) == 1


async def test_a_group_is_formed_anew_when_a_replica_was_rebuilt(pieces, plan_for, run_sync, ends, endpoint):
    senders, receivers = ends(num_receivers=2)
    loaders = [KeepingLoader(), KeepingLoader()]
    await run_sync(plan_for(pieces, 1, replicas=(0, 1)), senders, [StreamingTrainer(pieces)], receivers, loaders)
    first = senders[0]._member.group.name
    rebuilt = dataclasses.replace(endpoint("generator", replica=1), incarnation=1)
    plan = plan_for(pieces, 2, replicas=(0, 1))
    plan = dataclasses.replace(plan, receivers=(plan.receivers[0], rebuilt))
    new = BroadcastReceiver(BroadcastOptions(), rebuilt)
    loaders = [KeepingLoader(), KeepingLoader()]
    results = await run_sync(plan, senders, [StreamingTrainer(pieces)], [receivers[0], new], loaders)
    assert results == [6 * KIB] * 3
    assert senders[0]._member.group.name != first
    assert [group.name for group in receivers[0]._groups.values()] == [senders[0]._member.group.name]
    new.close()


async def test_after_a_failure_the_next_sync_works(pieces, plan_for, run_sync, ends):
    def fail(name):
        if name == "t4":
            raise RuntimeError("gather failed")

    senders, receivers = ends()
    broken = StreamingTrainer(pieces, before=fail)
    sent, received = await run_sync(plan_for(pieces, 1), senders, [broken], receivers, [KeepingLoader()])
    assert isinstance(sent, RuntimeError)
    assert "gather failed" in str(received)
    loader = KeepingLoader()
    results = await run_sync(plan_for(pieces, 2), senders, [StreamingTrainer(pieces)], receivers, [loader])
    assert results == [6 * KIB, 6 * KIB]
    assert loader.loaded.keys() == pieces.keys()


async def test_each_rank_that_owns_weights_has_a_group(pieces, plan_for, run_sync, ends):
    """Three ranks, the last of which owns nothing: it forms no group and delays no other rank."""
    senders, receivers = ends(num_senders=3)

    class TwoOwners(StreamingTrainer):
        def weights(self, *arguments, **keywords):
            for shard in super().weights(*arguments, **keywords):
                yield dataclasses.replace(shard, owner_rank=shard.owner_rank % 2)

    trainers = [TwoOwners(pieces, rank, 4) for rank in range(3)]
    loader = KeepingLoader()
    results = await run_sync(plan_for(pieces, ranks=3), senders, trainers, receivers, [loader])
    assert results == [3 * KIB, 3 * KIB, 0, 6 * KIB]
    assert [sender._member is not None for sender in senders] == [True, True, False]
    assert sorted(receivers[0]._groups) == [0, 1]


async def test_the_next_bucket_is_gathered_while_one_is_loaded(pieces, plan_for, run_sync, ends):
    gathered, events = threading.Event(), []

    def before_gather(name):
        events.append(f"gather {name}")
        if name == "t2":
            gathered.set()

    class Patient(KeepingLoader):
        async def load_tensors(self, tensors):
            assert await asyncio.to_thread(gathered.wait, 10), "nothing is gathered while a bucket is loaded"
            tensors = list(tensors)
            events.extend(f"load {name}" for name, _ in tensors)
            await super().load_tensors(tensors)

    senders, receivers = ends()
    trainer, loader = StreamingTrainer(pieces, before=before_gather), Patient()
    await run_sync(plan_for(pieces), senders, [trainer], receivers, [loader])
    assert loader.loaded.keys() == pieces.keys()
    assert events.index("gather t2") < events.index("load t0")


async def test_a_bucket_is_awaited_before_the_one_ahead_has_arrived_and_loaded_after_it(
    pieces, plan_for, run_sync, ends, monkeypatch
):
    """The first counts as complete only after the second, so awaiting them in turn would never end."""
    made, looks = [], []

    class SecondFirst(broadcast_receiver.Arrival):
        def __init__(self, group, tensor, tell):
            made.append(self)
            super().__init__(group, tensor, tell)

        @property
        def is_over(self):
            if self is not made[0]:
                return super().is_over
            looks.append(len(made) > 1 and made[1].is_over)
            return sum(looks) > 5 and super().is_over

    monkeypatch.setattr(broadcast_receiver, "Arrival", SecondFirst)
    monkeypatch.setattr(broadcast_receiver._Told, "wait", lambda self, _: asyncio.sleep(0.001))
    senders, receivers = ends()
    loader = KeepingLoader()
    async with asyncio.timeout(20):
        results = await run_sync(plan_for(pieces), senders, [StreamingTrainer(pieces)], receivers, [loader])
    assert results == [6 * KIB, 6 * KIB]
    assert len(made) == 6
    assert list(loader.loaded) == list(pieces)


@pytest.mark.slow
async def test_a_broadcast_that_breaks_off_is_said_by_the_receiver(pieces, plan_for, run_sync, ends, monkeypatch):
    class Broken(broadcast_receiver.Arrival):
        def wait(self):
            raise RuntimeError("connection reset")

    monkeypatch.setattr(broadcast_receiver, "Arrival", Broken)
    senders, receivers = ends()
    loader = KeepingLoader()
    plan = plan_for(pieces, timeout_s=6.0)  # the sender waits for it in vain
    sent, received = await run_sync(plan, senders, [StreamingTrainer(pieces)], receivers, [loader])
    assert isinstance(sent, WeightSyncError)
    assert "connection reset" in str(sent)
    assert isinstance(received, WeightSyncError)
    assert "connection reset" in str(received)
    assert not loader.loaded


async def test_memory_stays_under_the_bucket_bytes(pieces, plan_for, run_sync, ends):
    senders, receivers = ends(slot_mb=1)
    halves = {f"{name}.{part}": tensor[:128] for name, tensor in pieces.items() for part in "ab"}
    await run_sync(plan_for(halves), senders, [StreamingTrainer(halves)], receivers, [KeepingLoader()])
    assert senders[0]._buffers.held_bytes == 2 * KIB, "two flat buffers, of the four parts of the bucket bytes"
    assert receivers[0]._buffers[0].held_bytes == 2 * KIB


async def test_a_tensor_that_travels_alone_is_not_packed(pieces, plan_for, run_sync, ends, monkeypatch):
    monkeypatch.setattr(broadcast, "ALONE_BYTES", 2 * KIB)
    senders, receivers = ends()
    mixed = {
        "small": torch.ones(8),
        "large": torch.randn(512),
        "turned": torch.randn(32, 16).t(),
        "last": torch.ones(4),
    }
    loader = KeepingLoader()
    plan = plan_for(mixed, bucket_bytes=16 * KIB)
    await run_sync(plan, senders, [StreamingTrainer(mixed)], receivers, [loader])
    assert list(loader.loaded) == ["large", "turned", "small", "last"]
    assert all(torch.equal(loader.loaded[name], tensor) for name, tensor in mixed.items())
    used = [slot for slot in range(3) if slot in senders[0]._buffers._buffers]
    assert used == [0, 1], "of the large ones only the transposed one was copied"


@pytest.mark.parametrize("channel", ["tensors", "process_group"])
async def test_a_corrupted_bucket_is_noticed(pieces, plan_for, run_sync, ends, monkeypatch, channel):
    pack = flat_buffers.copy_with_checksum

    def corrupt(source, target):
        found = pack(source, target)
        if float(source[0]) == 3.0:
            target.view(torch.uint8)[9] ^= 1
        return found

    monkeypatch.setattr(flat_buffers, "copy_with_checksum", corrupt)
    senders, receivers = ends()
    plan = plan_for(pieces, bucket_bytes=8 * KIB, channel=channel)
    sent, received = await run_sync(plan, senders, [StreamingTrainer(pieces)], receivers, [KeepingLoader()])
    assert isinstance(received, WeightSyncError)
    assert "tensor 't3' is corrupted" in str(received)
    assert "bucket 1 of sender" in str(received)
    assert "tensor 't3' is corrupted" in str(sent), "the sender hears it, too"


async def test_an_engine_that_breaks_in_a_group_fails_the_sync_and_is_named(pieces, plan_for, run_sync, ends):
    class Broken(KeepingLoader):
        async def load_broadcast(self, group, tensors, checksums=None):
            if tensors[0].name == "t2":
                raise BackendError("engine is gone")
            await super().load_broadcast(group, tensors, checksums)

    senders, receivers = ends()
    plan = plan_for(pieces, channel="process_group")
    sent, received = await run_sync(plan, senders, [StreamingTrainer(pieces)], receivers, [Broken()])
    assert "engine is gone" in str(received)
    assert "role 'generator' replica 0" in str(sent)
    assert receivers[0]._joined == {}, "the engine has left its groups"


@pytest.mark.parametrize(
    ("devices", "option", "backend"),
    [
        (("cuda:0", "cuda:1"), "auto", "nccl"),
        (("cuda:0", "cpu"), "auto", "gloo"),
        (("cuda:0", "cuda:1"), "gloo", "gloo"),
    ],
)
def test_nccl_needs_every_end_on_a_gpu(pieces, plan_for, devices, option, backend):
    plan = plan_for(pieces)
    plan = dataclasses.replace(
        plan,
        senders=(dataclasses.replace(plan.senders[0], device=devices[0]),),
        receivers=(dataclasses.replace(plan.receivers[0], device=devices[1]),),
    )
    assert backend_of(plan, BroadcastOptions(backend=option)) == backend


def on_gpus(plan, sender, receiver):
    return dataclasses.replace(
        plan,
        senders=(dataclasses.replace(plan.senders[0], device=sender),),
        receivers=(dataclasses.replace(plan.receivers[0], device=receiver),),
    )


async def test_two_ends_on_one_gpu_use_gloo_and_it_is_said_why_once(pieces, plan_for, run_sync, caplog):
    for number in (1, 2):
        plan = on_gpus(plan_for(pieces, number), "cuda:0", "cuda:0")
        if number == 1:
            sender = BroadcastSender(BroadcastOptions(), plan.senders[0])
            receiver = BroadcastReceiver(BroadcastOptions(), plan.receivers[0])
        results = await run_sync(plan, [sender], [StreamingTrainer(pieces)], [receiver], [KeepingLoader()])
        assert results == [6 * KIB, 6 * KIB]
    said = [record.getMessage() for record in caplog.records if "gloo instead of nccl" in record.getMessage()]
    assert len(said) == 1
    assert "two ends of its process group are on GPU 0 of host host-a" in said[0]
    for end in (sender, receiver):
        end.close()


async def test_nccl_that_was_asked_for_is_refused_for_two_ends_on_one_gpu(pieces, plan_for, run_sync):
    plan = on_gpus(plan_for(pieces), "cuda:1", "cuda:1")
    sender = BroadcastSender(BroadcastOptions(backend="nccl"), plan.senders[0])
    receiver = BroadcastReceiver(BroadcastOptions(backend="nccl"), plan.receivers[0])
    sent, received = await run_sync(plan, [sender], [StreamingTrainer(pieces)], [receiver], [KeepingLoader()])
    assert "two ends of its process group are on GPU 1 of host host-a" in str(sent)
    assert "Set weight_sync.options.backend to gloo" in str(received)
    for end in (sender, receiver):
        end.close()


async def test_the_rendezvous_listens_at_one_address_alone(pieces, plan_for, run_sync, ends):
    senders, receivers = ends()
    await run_sync(plan_for(pieces), senders, [StreamingTrainer(pieces)], receivers, [KeepingLoader()])
    port = senders[0]._member.store.port
    listening = {
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    assert listening == {f"0100007F:{port:04X}"}, "127.0.0.1, in the kernel's writing"


async def test_a_receiver_that_does_not_join_is_named(pieces, plan_for, run_sync, ends, monkeypatch):
    async def stay_away(self, source, message):
        await asyncio.sleep(3)

    monkeypatch.setattr("chatlearn_sync.broadcast_receiver._FlatIntake._join", stay_away)
    senders, receivers = ends()
    plan = plan_for(pieces, timeout_s=1.0)
    sent, _ = await run_sync(plan, senders, [StreamingTrainer(pieces)], receivers, [KeepingLoader()])
    assert isinstance(sent, BackendError)
    assert "role 'generator' replica 0" in str(sent)


def test_only_one_host_is_needed_for_the_control_path(pieces, plan_for, ends, monkeypatch):
    monkeypatch.setattr(broadcast, "listening_host", lambda plan, sender, host: "127.0.0.1")
    (sender,), _ = ends()
    plan = plan_for(pieces)
    offer = sender.offer(plan)
    assert (offer.content.address.family, offer.content.address.host) == ("tcp", "127.0.0.1")
    sender.release(plan)
