from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import HostedCallError
from chatlearn_hosting import SharedBlock, handle_content
from chatlearn_hosting.engine_side.blocks import MappedBlock, MappedBlocks
from chatlearn_hosting.shared_block import ALIGNMENT


def tensors(count: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
    return {
        f"t{i}": (torch.rand(3 + i, 7, generator=generator) * 100).to(kinds[i % len(kinds)]) for i in range(count)
    } | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}


def test_tensors_are_read_as_they_were_written() -> None:
    with SharedBlock(1 << 16) as block:
        for name, tensor in tensors().items():
            assert block.add(name, tensor)
        handle = block.handle()
        assert all(place.offset % ALIGNMENT == 0 for place in handle.tensors)
        with MappedBlock(handle_content(handle)) as mapped:
            found = {name: tensor.clone() for name, tensor in mapped.tensors()}
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_transposed_tensor_is_written_in_its_own_order() -> None:
    source = torch.arange(12.0).view(3, 4).T
    with SharedBlock(4096) as block:
        block.add("t", source)
        with MappedBlock(handle_content(block.handle())) as mapped:
            assert torch.equal(dict(mapped.tensors())["t"].clone(), source)


def test_a_stream_is_cut_into_blocks_that_stay_under_the_bound() -> None:
    stream = [(f"w{i}", torch.full((100,), float(i))) for i in range(10)]  # 400 bytes each, 448 aligned
    with SharedBlock(1000) as block:
        sizes, seen = [], {}
        for handle in block.fill(iter(stream)):
            sizes.append(len(handle.tensors))
            assert handle.num_bytes == 1000
            with MappedBlock(handle_content(handle)) as mapped:
                seen |= {name: float(tensor[0]) for name, tensor in mapped.tensors()}
    assert sizes == [2, 2, 2, 2, 2]
    assert seen == {f"w{i}": float(i) for i in range(10)}


def test_a_tensor_larger_than_the_block_makes_it_grow() -> None:
    with SharedBlock(64) as block:
        handles = list(block.fill([("small", torch.zeros(4)), ("large", torch.ones(100)), ("last", torch.zeros(4))]))
    assert [[place.spec.name for place in handle.tensors] for handle in handles] == [["small"], ["large"], ["last"]]
    assert [handle.num_bytes for handle in handles] == [64, 400, 400]


def test_a_hosted_process_reads_a_block_and_lets_go_of_it(hosted) -> None:
    with SharedBlock(1 << 16) as block:
        block.add("w", torch.arange(10.0))
        content = handle_content(block.handle())
        assert hosted.call("sum_block", content, timeout_s=60) == {"w": 45.0}
        assert hosted.call("mapped_blocks", timeout_s=60) == 0
        with pytest.raises(HostedCallError, match="BufferError"):
            hosted.call("keep_view", content, timeout_s=60)


def test_a_block_that_is_filled_again_is_mapped_once_and_read_as_it_is_now() -> None:
    reader = MappedBlocks()
    with SharedBlock(1 << 16) as block:
        for value in (1.0, 2.0):
            block.clear()
            block.add("w", torch.full((10,), value))
            with reader.read({**handle_content(block.handle()), "is_reused": True}) as tensors:
                assert {name: float(tensor.sum()) for name, tensor in tensors} == {"w": 10 * value}
            assert reader.num_kept == 1
        with reader.read(handle_content(block.handle())) as tensors:
            assert [float(tensor.sum()) for _, tensor in tensors] == [20.0]
        assert reader.num_kept == 1
    reader.close()
    assert reader.num_kept == 0


def test_a_released_block_is_unmapped_and_not_confused_with_another_under_its_path() -> None:
    reader = MappedBlocks()
    paths = set()
    for value in (1.0, 2.0):
        with SharedBlock(1 << 16) as block:
            block.add("w", torch.full((10,), value))
            paths.add(block.path)
            with reader.read({**handle_content(block.handle()), "is_reused": True}) as tensors:
                assert [float(tensor.sum()) for _, tensor in tensors] == [10 * value]
    assert len(paths) == 1  # the descriptor's number was used again
    assert reader.num_kept == 1
    reader.close()


def test_a_view_that_is_kept_of_a_block_that_is_filled_again_is_an_error() -> None:
    reader = MappedBlocks()
    held = []
    with SharedBlock(1 << 16) as block:
        block.add("w", torch.ones(10))
        content = {**handle_content(block.handle()), "is_reused": True}
        with pytest.raises(BufferError, match="still alive"), reader.read(content) as tensors:
            held += list(tensors)
        held.clear()
        with reader.read(content) as tensors:
            assert [float(tensor.sum()) for _, tensor in tensors] == [10.0]

        def fail_while_reading() -> None:
            with reader.read(content) as tensors:
                held.extend(tensors)
                raise ValueError("the error itself")

        with pytest.raises(ValueError, match="the error itself"):
            fail_while_reading()
        held.clear()
    reader.close()


def test_a_block_has_no_name_that_could_be_left_behind(tmp_path) -> None:
    with SharedBlock(1 << 16) as block, SharedBlock(1 << 16, tmp_path) as filed:
        assert str(Path(block.path).readlink()) == "/memfd:chatlearn-block (deleted)"
        assert Path(filed.path).readlink().name.startswith("#")
        assert list(tmp_path.iterdir()) == []
        filed.add("x", torch.ones(3))
        with MappedBlock(handle_content(filed.handle())) as mapped:
            assert [float(tensor.sum()) for _, tensor in mapped.tensors()] == [3.0]
        path = block.path
    with pytest.raises(FileNotFoundError):
        MappedBlock({"path": path, "num_bytes": 10, "tensors": []})
    block.close()


def test_a_killed_owner_leaves_nothing() -> None:
    script = (
        "import os, signal, torch\nfrom chatlearn_hosting import SharedBlock\nblock = SharedBlock(1 << 20)\n"
        "block.add('w', torch.ones(1000))\nprint(block.path, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert found.returncode == -9
    assert not Path(found.stdout.strip()).exists()
