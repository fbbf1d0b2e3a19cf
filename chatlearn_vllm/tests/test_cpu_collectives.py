"""Against what one process computes with all ranks' tensors, over gloo between threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from chatlearn_vllm.engine_side.cpu_collectives import add_missing_collectives, all_gatherv, reduce_scatterv

NUM_RANKS = 3


@pytest.fixture(scope="module")
def on_all_ranks():
    """``on_all_ranks(function)``: results of ``function(rank, its gloo group)``."""
    store = dist.HashStore()
    with ThreadPoolExecutor(NUM_RANKS) as threads:

        def join(rank):
            return dist.ProcessGroupGloo(store, rank, NUM_RANKS, timeout=timedelta(seconds=20))

        groups = list(threads.map(join, range(NUM_RANKS)))

        def run(function):
            return list(threads.map(lambda rank: function(rank, Group(groups[rank])), range(NUM_RANKS)))

        yield run


class Group:
    """One rank's group as ``torch.distributed``'s functions would use it: those know one rank a process."""

    def __init__(self, group):
        self._group = group
        self.size, self.rank = group.size, group.rank

    def all_gather(self, parts, tensor):
        self._group.allgather([parts], [tensor]).wait()

    def all_reduce(self, tensor):
        self._group.allreduce([tensor]).wait()


@pytest.fixture(autouse=True)
def _groups_of_threads(monkeypatch):
    monkeypatch.setattr(dist, "all_gather", lambda parts, tensor, group: group.all_gather(parts, tensor))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: group.all_reduce(tensor))


def tensors(sizes, dim, dtype):
    """By rank: [sizes[rank], 4] or, along the last dimension, [4, sizes[rank]]."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 100, (sum(sizes), 4), generator=draw).to(dtype)
    return [part if dim == 0 else part.T for part in whole.split(sizes)]


@pytest.mark.parametrize("sizes", [[2, 5, 1], [0, 3, 2], [2, 2, 2], None])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_gathered_tensors_are_all_ranks_in_order(on_all_ranks, sizes, dim, dtype):
    parts = tensors(sizes or [2, 2, 2], dim, dtype)
    for gathered in on_all_ranks(lambda rank, group: all_gatherv(parts[rank], group, dim, sizes)):
        assert torch.equal(gathered, torch.cat(parts, dim=dim))


@pytest.mark.parametrize("sizes", [[2, 5, 1], [0, 3, 2], [2, 2, 2], None])
@pytest.mark.parametrize("dim", [0, -1])
def test_scattered_parts_are_those_of_the_sum(on_all_ranks, sizes, dim):
    length = sum(sizes or [2, 2, 2])
    given = tensors([length] * NUM_RANKS, dim, torch.float32)
    kept = [tensor.clone() for tensor in given]
    parts = on_all_ranks(lambda rank, group: reduce_scatterv(given[rank], group, dim, sizes))
    expected = sum(given).split(sizes or 2, dim=dim)
    for part, wanted in zip(parts, expected, strict=True):
        assert torch.equal(part, wanted)
    assert all(torch.equal(tensor, before) for tensor, before in zip(given, kept, strict=True))


@pytest.mark.engine
class TestVLLM:
    """Its communicator, whose own methods are put back."""

    @pytest.fixture
    def communicator(self, monkeypatch):
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        for name in ("all_gatherv", "reduce_scatterv"):
            if name in vars(CpuCommunicator):
                monkeypatch.delattr(CpuCommunicator, name)
        return CpuCommunicator

    def test_missing_collectives_are_added_with_the_signature_of_its_all_to_all(self, communicator, on_all_ranks):
        """A release that has them makes the first assertion fail: then this module can go."""
        from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

        assert communicator.all_gatherv is DeviceCommunicatorBase.all_gatherv
        add_missing_collectives()
        parts = tensors([2, 5, 1], 0, torch.float32)

        def exchange(rank, group):
            one = object.__new__(communicator)
            one.device_group = group
            hidden, ids = one.all_gatherv([parts[rank], parts[rank].long()], dim=0, sizes=[2, 5, 1])
            output = torch.empty(parts[rank].shape)
            one.reduce_scatterv_into_output(hidden, output, dim=0, sizes=[2, 5, 1])
            return hidden, ids, one.reduce_scatterv(hidden, dim=0, sizes=[2, 5, 1]), output

        for rank, (hidden, ids, scattered, output) in enumerate(on_all_ranks(exchange)):
            assert torch.equal(hidden, torch.cat(parts))
            assert torch.equal(ids, torch.cat(parts).long())
            assert torch.equal(scattered, NUM_RANKS * parts[rank])
            assert torch.equal(output, scattered)

    def test_existing_methods_are_not_replaced(self, communicator, monkeypatch):

        def own(*_):
            raise AssertionError

        monkeypatch.setattr(communicator, "all_gatherv", own, raising=False)
        add_missing_collectives()
        assert communicator.all_gatherv is own

    def test_a_gpu_is_left_alone(self, communicator, monkeypatch):
        import vllm.platforms

        monkeypatch.setattr(type(vllm.platforms.current_platform), "is_cpu", lambda _: False)
        add_missing_collectives()
        assert "all_gatherv" not in vars(communicator)
