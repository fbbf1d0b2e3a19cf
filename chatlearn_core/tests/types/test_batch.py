"""Packing samples and choosing from a packed batch, against slicing the samples themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Prompt, Sample, TrainBatch, cumulative_lengths, pack_samples

LENGTHS = st.lists(st.integers(1, 6), min_size=0, max_size=6)


def make_samples(lengths: list[int], num_groups: int = 2) -> list[Sample]:
    draw = np.random.default_rng(0)
    samples = []
    for i, length in enumerate(lengths):
        ids = draw.integers(0, 100, length)
        group = f"g{i % num_groups}"
        sample = Sample(f"s{i}", group, Prompt(group, ids[:1], "?"), ids, np.arange(length) > 0)
        sample.token_data["advantages"] = draw.standard_normal(length).astype(np.float32)
        sample.token_data["experts"] = draw.integers(0, 8, (length, 2))
        sample.sequence_data["score"] = float(i)
        samples.append(sample)
    return samples


@settings(deadline=None)
@given(LENGTHS)
def test_packing_lays_samples_end_to_end(lengths: list[int]) -> None:
    samples = make_samples(lengths)
    batch = pack_samples(samples)
    assert batch.num_sequences == len(lengths)
    assert batch.num_tokens == sum(lengths)
    assert batch.lengths == lengths
    assert batch.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.position_ids.tolist() == [t for length in lengths for t in range(length)]
    assert batch.sequence_index.tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]
    assert batch.group_index.tolist() == [i % 2 for i in range(len(lengths))]
    assert batch.unit_index.tolist() == list(range(len(lengths)))
    for sample, start, stop in zip(samples, batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        np.testing.assert_array_equal(batch.token_ids[start:stop], sample.token_ids)
        np.testing.assert_array_equal(batch.loss_mask[start:stop], sample.loss_mask)
        for name in ("advantages", "experts"):
            np.testing.assert_array_equal(batch.token_data[name][start:stop], sample.token_data[name])


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_selecting_equals_packing_the_chosen_samples(lengths: list[int], data: st.DataObject) -> None:
    samples = make_samples(lengths)
    chosen = data.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=8)) if lengths else []
    whole = pack_samples(samples)
    selected = whole.select(chosen)
    alone = pack_samples([samples[i] for i in chosen])
    assert selected.sample_ids == tuple(f"s{i}" for i in chosen)
    assert selected.lengths == alone.lengths
    torch.testing.assert_close(selected.token_ids, alone.token_ids)
    torch.testing.assert_close(selected.loss_mask, alone.loss_mask)
    assert selected.unit_index.tolist() == chosen, "units keep the numbers of the whole batch"
    for name in alone.token_data:
        torch.testing.assert_close(selected.token_data[name], alone.token_data[name])
    for name in alone.sequence_data:
        torch.testing.assert_close(selected.sequence_data[name], alone.sequence_data[name])


@pytest.mark.parametrize(("kind", "name"), [("token_data", "experts"), ("sequence_data", "score")])
def test_data_that_one_sample_lacks_is_refused_by_name_and_sample(kind: str, name: str) -> None:
    samples = make_samples([2, 3, 1])
    del getattr(samples[1], kind)[name]
    with pytest.raises(BackendError, match=rf"sample 's1' has no {kind} '{name}', but sample 's0' has \(2 of 3"):
        pack_samples(samples)


def test_per_token_data_of_another_length_is_refused_by_name_and_sample() -> None:
    samples = make_samples([2, 3])
    samples[1].token_data["advantages"] = np.zeros(2, np.float32)
    with pytest.raises(BackendError, match="sample 's1': token_data 'advantages' has 2 entries for 3 tokens"):
        pack_samples(samples)


def test_units_can_be_given() -> None:
    assert pack_samples(make_samples([2, 2, 2]), [4, 4, 9]).unit_index.tolist() == [0, 0, 1]


def test_samples_of_one_unit_stay_together() -> None:
    chosen, other, rejected = make_samples([2, 3, 2])
    chosen.unit_id = rejected.unit_id = "pair"
    assert pack_samples([chosen, other, rejected]).unit_index.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            np.zeros((3, 4), np.int64),
            r"int64 rows of shape \(4,\), and .* first sample int64 rows of shape \(2,\)",
        ),
        (np.zeros((3, 2), np.float32), "float32 rows .* first sample int64 rows"),
    ],
)
def test_per_token_data_with_other_rows_is_refused_by_name_and_sample(values: Any, problem: str) -> None:
    samples = make_samples([2, 3])
    samples[1].token_data["experts"] = values
    with pytest.raises(BackendError, match=f"sample 's1': token_data 'experts' has {problem}"):
        pack_samples(samples)


def test_a_batch_knows_prompts_and_examples() -> None:
    batch = pack_samples(make_samples([4, 2, 3])).select([2, 0]).to("cpu")
    assert batch.num_prompt_tokens.tolist() == [1, 1]
    assert batch.example_ids == ("g0", "g0")


def test_an_empty_batch_is_legal() -> None:
    batch = pack_samples([])
    assert (batch.num_sequences, batch.num_tokens, batch.lengths) == (0, 0, [])
    assert batch.position_ids.tolist() == []
    assert batch.cu_seqlens.tolist() == [0]


def test_moving_leaves_the_index_tensors_on_the_host() -> None:
    batch = pack_samples(make_samples([2, 3])).to("meta")
    assert batch.token_ids.device.type == batch.token_data["experts"].device.type == "meta"
    assert batch.sequence_data["score"].device.type == "meta"
    assert {t.device.type for t in (batch.cu_seqlens, batch.unit_index, batch.group_index)} == {"cpu"}


def test_dtypes() -> None:
    batch: Any = pack_samples(make_samples([2]))
    assert isinstance(batch, TrainBatch)
    assert (batch.token_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    assert cumulative_lengths([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert cumulative_lengths([]).dtype == torch.int32
