from __future__ import annotations

import pickle
from typing import Any, cast

import numpy as np
import pytest
import torch

from chatlearn_core.types import ArrayRef, Rows, TensorRef, TrainBatch, cumulative_lengths
from chatlearn_workers.arrays import BatchArrays, RowsArray, TensorArray
from chatlearn_workers.blocks import StoredBlock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_survives(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0, 1.0]).to(dtype).reshape(2, 2)
    back = pickle.loads(pickle.dumps(TensorArray.of(tensor))).tensor()
    assert back.dtype == dtype
    assert back.shape == (2, 2)
    assert back.float().tolist() == tensor.float().tolist()


def test_values_are_not_copied() -> None:
    tensor = torch.arange(4)
    assert TensorArray.of(tensor).array.ctypes.data == tensor.data_ptr()
    array = np.arange(4)
    assert TensorArray(array).tensor().data_ptr() == array.ctypes.data


def test_arrays_travel_outside_the_pickle() -> None:
    """Protocol 5 hands buffers over apart: that is what the object store maps instead of copying."""
    arrays = TensorArray.of(torch.zeros(10_000))
    buffers: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)) < 1_000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 40_000


def test_a_batch_survives() -> None:
    batch = TrainBatch(
        sample_ids=("a", "b"),
        token_ids=torch.arange(5),
        cu_seqlens=cumulative_lengths([2, 3]),
        loss_mask=torch.tensor([False, True, False, True, True]),
        unit_index=torch.tensor([0, 1]),
        group_index=torch.tensor([0, 0]),
        token_data={"advantages": torch.linspace(0, 1, 5, dtype=torch.bfloat16)},
        sequence_data={"score": torch.tensor([1.5, 2.5])},
    )
    back = BatchArrays.of(batch).batch()
    assert back.sample_ids == batch.sample_ids
    assert back.lengths == [2, 3]
    for name in ("token_ids", "loss_mask", "unit_index", "group_index", "cu_seqlens"):
        assert torch.equal(getattr(back, name), getattr(batch, name))
    assert torch.equal(back.token_data["advantages"], batch.token_data["advantages"])
    assert torch.equal(back.sequence_data["score"], batch.sequence_data["score"])


class Block(StoredBlock):
    """A block that is here."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]  # it is here: no store is asked
        self.fill({"x": array})


def stored_tensor() -> TensorRef:
    block, other = Block(np.arange(10)), Block(np.arange(100, 110))
    first: Any = ArrayRef([np.array([7, 7]), Rows(block, "x", 1, 4)], (), np.int64)
    second: Any = ArrayRef([Rows(other, "x", 0, 2), Rows(block, "x", 9, 10)], (), np.int64)
    return TensorRef([first, np.array([5]), second])


def test_a_tensor_by_reference_is_put_together_where_it_arrives() -> None:
    carried = RowsArray.of(stored_tensor())
    assert len(carried.blocks) == 2, "a block is named once"
    assert carried.tensor().tolist() == [7, 7, 1, 2, 3, 5, 100, 101, 9]
    assert carried.nbytes == carried.at_hand.nbytes + carried.index.nbytes
    assert carried.at_hand.tolist() == [7, 7, 5]


def test_masks_and_weights_of_a_batch_travel_in_short() -> None:
    def batch(length: int) -> TrainBatch:
        mask = torch.arange(length) >= 3
        return TrainBatch(
            sample_ids=("a",),
            token_ids=cast(torch.Tensor, stored_tensor()),
            cu_seqlens=cumulative_lengths([length]),
            loss_mask=mask,
            unit_index=torch.tensor([0]),
            group_index=torch.tensor([0]),
            token_data={"advantages": torch.where(mask, 0.25, 0.0)},
        )

    short, long = BatchArrays.of(batch(500)), BatchArrays.of(batch(50_000))
    assert short.num_bytes == long.num_bytes
    assert torch.equal(long.batch().token_data["advantages"], batch(50_000).token_data["advantages"])
    assert torch.equal(long.batch().loss_mask, batch(50_000).loss_mask)
