from __future__ import annotations

import asyncio

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_hosting.engine_side.checksums import checksum
from chatlearn_sync.checksum import PIECE_BYTES, copy_with_checksum, load_and_verify, verify


@pytest.mark.parametrize("elements", [5, PIECE_BYTES // 4 + 3, 2 * PIECE_BYTES // 4])
def test_copying_gives_the_same_checksum_and_the_same_bytes(elements):
    source = torch.randn(elements)
    target = torch.empty(elements)
    assert copy_with_checksum(source, target) == checksum(source)
    assert torch.equal(source, target)


def test_a_transposed_tensor_is_summed_as_it_is_copied():
    source = torch.randn(700, 900).t()
    target = torch.empty(900, 700)
    assert copy_with_checksum(source, target) == checksum(target)
    assert torch.equal(source, target)


def test_the_tensor_that_changed_is_named():
    tensors = [("a", torch.ones(3)), ("b", torch.ones(3))]
    checksums = [checksum(tensor) for _, tensor in tensors]
    verify(tensors, checksums, "here")
    tensors[1][1][0] = 2.0
    with pytest.raises(WeightSyncError, match=r"here: tensor 'b' is corrupted: its checksum is 0x\w+, the sender has"):
        verify(tensors, checksums, "here")


async def test_loading_and_verifying_end_together():
    loaded, tensor = [], torch.ones(3)

    async def load():
        await asyncio.sleep(0)
        loaded.append(True)

    await load_and_verify(load(), [("a", tensor)], [checksum(tensor)], "here")
    with pytest.raises(WeightSyncError, match="tensor 'a' is corrupted"):
        await load_and_verify(load(), [("a", tensor)], [0], "here")
    await load_and_verify(load(), [("a", tensor)], None, "here")
    assert loaded == [True] * 3
