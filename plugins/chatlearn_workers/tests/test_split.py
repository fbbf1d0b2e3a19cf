"""Nothing is lost and nothing counted twice, whatever the number of samples and ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.exceptions import BackendError
from chatlearn_core.flow import FlowVocabulary
from chatlearn_core.types import Metric, TrainBatch, cumulative_lengths
from chatlearn_workers.split import answers_of_slices, assign, gather_metrics, gather_outputs, sequence_outputs, take

OUTPUTS = FlowVocabulary.builtin().outputs


def batch_of(lengths: list[int], units: list[int] | None = None) -> TrainBatch:
    """Token t of the whole batch has id t, so that every token can be told apart."""
    total = sum(lengths)
    return TrainBatch(
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        token_ids=torch.arange(total),
        cu_seqlens=cumulative_lengths(lengths),
        loss_mask=torch.ones(total, dtype=torch.bool),
        unit_index=torch.tensor(units if units is not None else list(range(len(lengths))), dtype=torch.int64),
        group_index=torch.zeros(len(lengths), dtype=torch.int64),
        token_data={"advantages": torch.arange(total) * 0.5},
        sequence_data={"score": torch.arange(len(lengths)) * 1.0},
    )


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    lengths = draw(st.lists(st.integers(1, 30), max_size=24))
    units = [draw(st.integers(0, 6)) for _ in lengths]
    return batch_of(lengths, units)


@given(batches(), st.integers(1, 9))
def test_slices_hold_every_sequence_once_and_units_whole(batch: TrainBatch, size: int) -> None:
    slices = take(batch, assign(batch, size))
    assert len(slices) == size
    assert sorted(name for part in slices for name in part.sample_ids) == sorted(batch.sample_ids)
    assert sorted(torch.cat([part.token_ids for part in slices]).tolist()) == batch.token_ids.tolist()
    homes = [set(part.unit_index.tolist()) for part in slices]
    assert sum(len(home) for home in homes) == len(set(batch.unit_index.tolist()))


@given(batches(), st.integers(1, 5), st.integers(1, 3))
def test_outputs_come_back_in_batch_order(batch: TrainBatch, data_parallel: int, model_parallel: int) -> None:
    assignment = assign(batch, data_parallel)
    slices = take(batch, assignment)
    ranks = [slice_ for slice_ in range(data_parallel) for _ in range(model_parallel)]
    answers = []
    for position, slice_ in enumerate(ranks):
        part = slices[slice_]
        is_last_stage = position % model_parallel == model_parallel - 1
        answers.append(
            {"logprobs": part.token_ids.float(), "scores": part.sequence_data["score"]} if is_last_stage else {}
        )
    outputs = gather_outputs(batch, assignment, answers, ranks, sequence_outputs(OUTPUTS))
    assert outputs["logprobs"].tolist() == batch.token_ids.tolist()
    assert outputs["scores"].tolist() == batch.sequence_data["score"].tolist()


def test_13_samples_on_4_ranks_are_balanced_by_tokens() -> None:
    batch = batch_of([100, *[10] * 12])
    tokens = [part.num_tokens for part in take(batch, assign(batch, 4))]
    assert sorted(tokens) == [40, 40, 40, 100]


def test_1_sample_on_8_ranks_leaves_seven_empty() -> None:
    slices = take(batch_of([5]), assign(batch_of([5]), 8))
    assert [part.num_sequences for part in slices] == [1, 0, 0, 0, 0, 0, 0, 0]
    assert slices[3].token_data["advantages"].shape == (0,)


def test_one_slice_is_the_batch_itself() -> None:
    batch = batch_of([3, 1, 2])
    assert take(batch, assign(batch, 1))[0] is batch


def test_metrics_count_a_model_parallel_group_once() -> None:
    part = {"loss": Metric(2.0, reducer="sum")}
    assert gather_metrics([part, part, part, part], [0, 0, 1, 1])["loss"].value == 4.0


def test_each_name_of_a_slice_comes_from_the_first_rank_that_has_it() -> None:
    assert answers_of_slices([{}, {"a": 1}, {"a": 2, "b": 3}, {"a": 4, "c": 5}], [0, 0, 1, 1]) == [
        {"a": 1},
        {"a": 2, "b": 3, "c": 5},
    ]


def test_what_a_first_stage_reports_hides_nothing_of_the_last_stage() -> None:
    """Two pipelines of two stages: the first stages report a time, the last ones the loss."""
    first, last = {"timing_s/embed": Metric(1.0)}, {"loss": Metric(2.0, reducer="sum"), "grad_norm": Metric(3.0)}
    merged = gather_metrics([first, last, first, {"loss": Metric(5.0, reducer="sum")}], [0, 0, 1, 1])
    assert {name: metric.value for name, metric in merged.items()} == {
        "timing_s/embed": 1.0,
        "loss": 7.0,
        "grad_norm": 3.0,
    }


def test_outputs_of_a_slice_may_come_from_different_stages() -> None:
    batch = batch_of([2, 1])
    answers = [{"hidden_states": torch.ones(3, 4)}, {"logprobs": torch.arange(3.0)}]
    outputs = gather_outputs(batch, [[0, 1]], answers, [0, 0], sequence_outputs(OUTPUTS))
    assert outputs["logprobs"].tolist() == [0.0, 1.0, 2.0]
    assert outputs["hidden_states"].shape == (3, 4)


def test_a_slice_without_answer_is_an_error() -> None:
    batch = batch_of([2, 2])
    with pytest.raises(BackendError, match="slice 1 returned outputs for its 1 sequences"):
        gather_outputs(batch, [[0], [1]], [{"logprobs": torch.zeros(2)}, {}], [0, 1], sequence_outputs(OUTPUTS))


def test_a_slice_with_too_few_rows_is_an_error() -> None:
    batch = batch_of([2, 3])
    answers = [{"logprobs": torch.zeros(2)}, {"logprobs": torch.zeros(2)}]
    with pytest.raises(BackendError, match="slice 1 returned 2 rows of 'logprobs' for 1 sequences of 3 tokens"):
        gather_outputs(batch, [[0], [1]], answers, [0, 1], sequence_outputs(OUTPUTS))
