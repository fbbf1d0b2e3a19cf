"""Batches that share packed arrays equal batches that are packed by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.batching import SamplePacker
from chatlearn_core.types import Prompt, Sample, TrainBatch, pack_samples
from chatlearn_core.types.array_ref import ArrayRef, Fill, TensorRef


def make_samples(lengths: list[int]) -> list[Sample]:
    """One sample per length; no two tokens are equal."""
    samples, start = [], 100
    for index, length in enumerate(lengths):
        ids = np.arange(start, start + length)
        data: dict[str, Any] = {"experts": np.stack([ids, -ids], axis=1)}
        prompt = Prompt(f"g{index // 2}", ids[:1], "?")
        sample = Sample(f"s{index}", f"g{index // 2}", prompt, ids, ids % 3 > 0, token_data=data)
        sample.sequence_data["score"] = index / 2
        samples.append(sample)
        start += length
    return samples


def assert_equal(found: TrainBatch, expected: TrainBatch) -> None:
    """Bit for bit, types included."""
    assert (found.sample_ids, found.example_ids) == (expected.sample_ids, expected.example_ids)
    for name in ("token_ids", "cu_seqlens", "loss_mask", "unit_index", "group_index", "num_prompt_tokens"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)
    for kind in ("token_data", "sequence_data"):
        torch.testing.assert_close(getattr(found, kind), getattr(expected, kind), rtol=0, atol=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_every_batch_equals_one_packed_by_itself(lengths: list[int], data: st.DataObject) -> None:
    samples, packer = make_samples(lengths), SamplePacker()
    for number in range(4):
        chosen = [samples[i] for i in data.draw(st.lists(st.sampled_from(range(len(samples))), max_size=8))]
        units = data.draw(st.none() | st.just([0] * len(chosen)))
        assert_equal(packer.pack(chosen, units), pack_samples(chosen, units))
        added = data.draw(st.sampled_from(["replaced", "computed"]))
        for sample in samples if added == "replaced" else ():
            sample.token_data["experts"] = sample.token_data["experts"] + 1
        if added == "computed":
            whole = packer.pack(samples)
            values = torch.rand(whole.num_tokens, dtype=torch.float64)
            for sample, row in zip(samples, packer.unpack(values, whole, f"values_{number}"), strict=True):
                sample.token_data[f"values_{number}"] = row
            torch.testing.assert_close(packer.pack(samples).token_data[f"values_{number}"], values.float())


def test_nothing_is_copied_that_is_packed_already() -> None:
    samples, packer = make_samples([2, 3, 1, 4]), SamplePacker()
    whole = packer.pack(samples)
    values = torch.rand(10)
    for sample, row in zip(samples, packer.unpack(values, whole, "values"), strict=True):
        sample.token_data["values"] = row
    neighbours = packer.pack(samples[1:3])
    for name, packed in {"token_ids": whole.token_ids, "loss_mask": whole.loss_mask}.items():
        assert getattr(neighbours, name).data_ptr() == packed[2:].data_ptr(), "a view that begins at the second sample"
    assert neighbours.token_data["values"].data_ptr() == values[2:].data_ptr()
    assert neighbours.token_data["experts"].data_ptr() == whole.token_data["experts"][2:].data_ptr()
    apart = packer.pack([samples[0], samples[3]])
    assert apart.token_ids.tolist() == [*samples[0].token_ids, *samples[3].token_ids]
    assert packer.pack(samples).token_ids.data_ptr() == whole.token_ids.data_ptr(), "the packed tensors stay"


def test_an_array_that_is_packed_cannot_be_changed_unnoticed() -> None:
    samples, packer = make_samples([2, 3]), SamplePacker()
    packer.pack(samples)
    with pytest.raises(ValueError, match="read-only"):
        samples[1].token_ids[0] = 7


def test_references_stay_references() -> None:
    samples, packer = make_samples([2, 3]), SamplePacker()
    for sample in samples:
        sample.token_data["experts"] = ArrayRef([Fill(3.0, len(sample.token_ids))], (), np.float32)  # type: ignore[assignment]  # as in the driver of a run with several processes
    batch: Any = packer.pack(samples)
    assert isinstance(batch.token_data["experts"], TensorRef)
    rows = packer.unpack(batch.token_data["experts"], batch, "experts")
    assert [len(row) for row in rows] == [2, 3]
    assert all(isinstance(row, ArrayRef) for row in rows)
