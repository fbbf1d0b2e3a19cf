from __future__ import annotations

import pytest
import torch

from chatlearn_hosting.engine_side.groups import tensors_in
from chatlearn_sync.checksum import checksum
from chatlearn_sync.flat_buffers import FlatBuffers, flat_limit, pack, spec_of, wider_first
from chatlearn_sync.shard_spec import whole_shard
from chatlearn_sync.stream import num_bytes


def test_what_is_packed_comes_out_of_the_flat_tensor(tensors):
    mixed = {**tensors, "odd": torch.arange(3, dtype=torch.int8), "none": torch.zeros(0, 4)}
    bucket = wider_first([whole_shard(name, tensor) for name, tensor in mixed.items()])
    sizes = [shard.tensor.element_size() for shard in bucket]
    assert sizes == sorted(sizes, reverse=True)
    flat = torch.empty(num_bytes(tuple(bucket)), dtype=torch.uint8)
    sums = pack(bucket, flat, with_checksums=True)
    specs = [spec_of(shard.name, shard.tensor) for shard in bucket]
    found = tensors_in(flat, [(spec.name, spec.dtype, list(spec.shape)) for spec in specs])
    assert [name for name, _ in found] == [shard.name for shard in bucket]
    for shard, (_, after), total in zip(bucket, found, sums, strict=True):
        assert torch.equal(shard.tensor, after)
        assert checksum(after) == total
    assert pack(bucket, flat, with_checksums=False) is None


@pytest.mark.parametrize(
    ("least", "bucket_bytes", "limit"), [(1, 1 << 20, 1024), (4096, 1 << 20, 4096), (4096, 2000, 500)]
)
def test_a_buffer_takes_the_largest_tensor_where_it_may(tensors, make_plan, least, bucket_bytes, limit):
    """The largest of the fixture's tensors has 1,024 bytes; the limit is a quarter of the bucket bytes."""
    assert flat_limit(make_plan(tensors, bucket_bytes=bucket_bytes), least) == limit


def test_buffers_take_turns_and_keep_their_memory():
    buffers = FlatBuffers(100, "cpu")
    assert [buffers.slot(number, 80) for number in range(4)] == [0, 1, 0, 1]
    assert buffers.slot(3, 101) == 2
    first = buffers.get(0, 80)
    assert buffers.get(0, 100).data_ptr() == first.data_ptr()
    assert (buffers.get(0, 30).numel(), buffers.held_bytes) == (30, 100)
    assert buffers.get(2, 300).numel() == 300
    assert buffers.held_bytes == 400
