"""Several hosts: every receiver takes the whole model from the senders beside it, and nothing from elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from chatlearn_sync.options import CudaIpcOptions, SharedMemoryOptions
from chatlearn_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from chatlearn_sync.within_hosts import ranks_sent_by
from chatlearn_testing.suites.weight_sync_fixtures import StreamingTrainer

from .test_cuda_ipc import HandleLoader, export_of

HOSTS = ("a", "a", "b", "b", "b", "c")
"""Of the trainer's ranks."""


@pytest.fixture
def pieces():
    return {f"t{i}": torch.full((256,), float(i)) for i in range(13)} | {"odd": torch.randn(5).to(torch.bfloat16)}


@pytest.fixture
def on(endpoint):
    return lambda role, host, **which: dataclasses.replace(endpoint(role, **which), host=host)


@pytest.fixture
def senders(on):
    return tuple(on("trainer", host, rank=rank) for rank, host in enumerate(HOSTS))


def test_what_is_owned_elsewhere_is_sent_once_on_each_host(senders, make_plan, pieces):
    plan = make_plan(pieces, senders=senders)
    for host in set(HOSTS):
        shares = [ranks_sent_by(sender, plan) for sender in senders if sender.host == host]
        assert sorted(rank for share in shares for rank in share) == list(range(len(HOSTS)))
        assert all(sender.rank in ranks_sent_by(sender, plan) for sender in senders)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_on_one_host_every_rank_sends_its_own(endpoint, make_plan, pieces):
    ends = tuple(endpoint("trainer", rank=rank) for rank in range(3))
    assert [ranks_sent_by(end, make_plan(pieces, senders=ends)) for end in ends] == [{0}, {1}, {2}]


async def test_shared_memory_serves_each_host_from_its_own_ranks(pieces, senders, make_plan, on, loader, run_sync):
    receivers = tuple(on("generator", host, replica=index) for index, host in enumerate("aba"))
    plan = make_plan(pieces, senders=senders, receivers=receivers)
    sending = [SharedMemorySender(SharedMemoryOptions(), end) for end in senders]
    receiving = [SharedMemoryReceiver(SharedMemoryOptions(), end) for end in receivers]
    loaders = [loader() for _ in receivers]
    trainers = [StreamingTrainer(pieces, rank, len(HOSTS)) for rank in range(len(HOSTS))]
    size = sum(tensor.nbytes for tensor in pieces.values())
    counts = await run_sync(plan, sending, trainers, receiving, loaders)
    assert counts[len(HOSTS) :] == [size] * 3
    assert [sum(counts[:2]), sum(counts[2:5]), counts[5]] == [size, size, 0], "once within each host that has a replica"
    for load in loaders:
        assert all(torch.equal(load.loaded[name], tensor) for name, tensor in pieces.items())
    for end in (*sending, *receiving):
        end.close()


async def test_cuda_ipc_serves_each_host_from_its_own_gpus(pieces, senders, make_plan, on, run_sync):
    receivers = tuple(on("generator", host, replica=index) for index, host in enumerate("ba"))
    plan = make_plan(pieces, channel="memory_handles", senders=senders, receivers=receivers, bucket_bytes=8 << 10)
    sending = [CudaIpcSender(CudaIpcOptions(), end, export_of(end.rank)) for end in senders]
    receiving = [CudaIpcReceiver(CudaIpcOptions(), end) for end in receivers]
    seen = [set(), set()]

    class Watching(HandleLoader):
        def __init__(self, gpus):
            super().__init__()
            self.gpus = gpus

        async def load_handles(self, handle):
            self.gpus.update(handle.content)
            await super().load_handles(handle)

    loaders = [Watching(gpus) for gpus in seen]
    trainers = [StreamingTrainer(pieces, rank, len(HOSTS)) for rank in range(len(HOSTS))]
    await run_sync(plan, sending, trainers, receiving, loaders)
    assert seen == [{"gpu-2", "gpu-3", "gpu-4"}, {"gpu-0", "gpu-1"}]
    for load in loaders:
        assert all(torch.equal(load.loaded[name], tensor) for name, tensor in pieces.items())
    for end in (*sending, *receiving):
        end.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda end: SharedMemorySender(SharedMemoryOptions(), end),
        lambda end: CudaIpcSender(CudaIpcOptions(), end, export_of(end.rank)),
    ],
)
def test_a_receiver_on_a_host_without_a_sender_is_refused_by_every_sender(make, pieces, senders, make_plan, on):
    plan = make_plan(pieces, senders=senders, receivers=(on("generator", "a"), on("generator", "d", replica=1)))
    for end in senders:
        sender = make(end)
        with pytest.raises(WeightSyncError, match=r"receiver .*host d.*no other sender is on d; set weight_sync"):
            sender.offer(plan)
        sender.close()
