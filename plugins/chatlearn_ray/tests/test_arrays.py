from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from chatlearn_core.types import TrainBatch, cumulative_lengths
from chatlearn_ray.arrays import BatchArrays, TensorArray


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
