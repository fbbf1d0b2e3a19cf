from __future__ import annotations

import dataclasses

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_sync.cuda_ipc import CudaIpcReceiver, CudaIpcSender, export_block
from chatlearn_sync.options import CudaIpcOptions
from chatlearn_sync.plugin import chatlearn_weight_syncs
from chatlearn_testing.check import run_conformance
from chatlearn_testing.suites.weight_sync_fixtures import StreamingTrainer

KIB = 1 << 10
BLOCKS: dict[str, torch.Tensor] = {}
"""What stands for GPU memory: the ends share a process here."""


def find_block(key):
    return BLOCKS[key]


def export_of(rank):
    def export(block):
        BLOCKS[f"{rank}-{block.data_ptr()}"] = block
        return f"gpu-{rank}", (find_block, (f"{rank}-{block.data_ptr()}",))

    return export


class HandleLoader:
    """An engine with a rank on every GPU: each opens its own block, and all must hold the same."""

    def __init__(self):
        self.loaded, self.num_blocks = {}, set()

    async def load_handles(self, handle):
        assert handle.kind == "cuda_ipc"
        self.num_blocks.add(len(handle.content))
        for function, arguments in handle.content.values():
            block = function(*arguments)
            assert block.numel() == handle.num_bytes
            for place in handle.tensors:
                data = block[place.offset : place.offset + place.spec.num_bytes]
                tensor = data.view(getattr(torch, place.spec.dtype)).view(place.spec.shape).clone()
                known = self.loaded.setdefault(place.spec.name, tensor)
                assert torch.equal(known, tensor)

    async def load_tensors(self, tensors): ...
    async def load_boxes(self, shards): ...
    async def load_checkpoint(self, directory): ...
    async def begin(self, policy_version, manifest): ...
    async def finish(self): ...
    async def fail(self, reason): ...
    def expected_manifest(self): ...


@pytest.fixture
def pieces():
    return {f"t{i}": torch.full((256,), float(i)) for i in range(7)} | {"odd": torch.randn(5).to(torch.bfloat16)}


@pytest.fixture
def plan(make_plan, pieces, endpoint):
    senders = tuple(endpoint("trainer", rank=rank) for rank in range(2))
    return make_plan(pieces, channel="memory_handles", senders=senders, bucket_bytes=8 * KIB)


@pytest.fixture
def ends(endpoint):
    senders = [CudaIpcSender(CudaIpcOptions(), endpoint("trainer", rank=r), export_of(r)) for r in range(2)]
    receiver = CudaIpcReceiver(CudaIpcOptions(), endpoint("generator"))
    yield senders, receiver
    for one in (*senders, receiver):
        one.close()


async def test_every_rank_sends_all_and_a_handle_has_a_block_for_each_gpu(pieces, plan, ends, run_sync):
    senders, receiver = ends
    trainers = [StreamingTrainer(pieces, rank, 2) for rank in range(2)]
    loader = HandleLoader()
    size = sum(tensor.nbytes for tensor in pieces.values())
    assert await run_sync(plan, senders, trainers, [receiver], [loader]) == [size, size, size]
    assert loader.num_blocks == {2}
    assert all(torch.equal(loader.loaded[name], tensor) for name, tensor in pieces.items())


async def test_blocks_outlive_a_sync_and_are_exported_once(pieces, plan, endpoint, run_sync):
    exports = []

    def export(block):
        exports.append(block.data_ptr())
        return export_of(0)(block)

    sender = CudaIpcSender(CudaIpcOptions(), endpoint("trainer"), export)
    receiver = CudaIpcReceiver(CudaIpcOptions(), endpoint("generator"))
    for number in (1, 2, 3):
        tensors = {name: tensor + number for name, tensor in pieces.items()}
        loader = HandleLoader()
        one = dataclasses.replace(plan, sync_id=f"s{number}", senders=plan.senders[:1])
        await run_sync(one, [sender], [StreamingTrainer(tensors)], [receiver], [loader])
        assert all(torch.equal(loader.loaded[name], tensor) for name, tensor in tensors.items())
    assert len(exports) == len(set(exports)) == 2
    sender.close()


async def test_ranks_that_do_not_stream_alike_are_refused(pieces, plan, ends, run_sync):
    senders, receiver = ends
    turned = dict(reversed(list(pieces.items())))
    trainers = [StreamingTrainer(pieces, 0, 2), StreamingTrainer(turned, 1, 2)]
    *_, received = await run_sync(plan, senders, trainers, [receiver], [HandleLoader()])
    assert "holds other tensors than that bucket of another rank" in str(received)


async def test_a_loader_that_fails_ends_both_ranks(pieces, plan, ends, run_sync):
    class Broken(HandleLoader):
        async def load_handles(self, handle):
            raise RuntimeError("no such GPU here")

    senders, receiver = ends
    trainers = [StreamingTrainer(pieces, rank, 2) for rank in range(2)]
    *sent, received = await run_sync(plan, senders, trainers, [receiver], [Broken()])
    assert "no such GPU here" in str(received)
    assert all("no such GPU here" in str(error) for error in sent)


async def test_host_memory_is_refused_with_the_remedy(pieces, make_plan, endpoint, run_sync):
    sender = CudaIpcSender(CudaIpcOptions(), endpoint("trainer"))
    receiver = CudaIpcReceiver(CudaIpcOptions(), endpoint("generator"))
    plan = make_plan(pieces, channel="memory_handles")
    sent, _ = await run_sync(plan, [sender], [StreamingTrainer(pieces)], [receiver], [HandleLoader()])
    assert isinstance(sent, WeightSyncError)
    assert "cannot be shared by CUDA IPC" in str(sent)
    assert "'shared_memory' or 'broadcast'" in str(sent)


@pytest.mark.gpu
def test_another_process_reads_a_block_of_this_gpu():
    import multiprocessing

    block = torch.arange(256, dtype=torch.uint8, device="cuda")
    uuid, rebuild = export_block(block)
    assert uuid == str(torch.cuda.get_device_properties(0).uuid)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    child = context.Process(target=read_block, args=(rebuild, answers))
    child.start()
    assert answers.get() == list(range(256))
    child.join()


def read_block(rebuild, answers):
    function, arguments = rebuild
    answers.put(function(*arguments).tolist())


def test_its_contract_does_not_apply_to_one_process_on_a_cpu() -> None:
    [record] = [record for record in chatlearn_weight_syncs() if record.name == "cuda_ipc"]
    results = run_conformance([record])
    assert results.conforms, results.of("failed")
    assert any("needs_gpus" in verdict.reason for verdict in results.of("skipped"))
