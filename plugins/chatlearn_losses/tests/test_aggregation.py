from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.types import TrainBatch
from chatlearn_losses.aggregation import AggregationMode, aggregation_weights

MODES = get_args(AggregationMode)
MASKS = [[0, 1, 1, 1], [0, 0, 1], [0, 0], [0, 1, 0, 1, 1]]
GROUPS = [0, 0, 1, 1]
LENGTH = 8


def weights_of(batch: TrainBatch, mode: str) -> torch.Tensor:
    return aggregation_weights(batch, mode, constant_length=LENGTH if mode == "seq_mean_token_sum_norm" else None)


def loop_aggregate(batch: TrainBatch, losses: torch.Tensor, mode: str) -> float:
    """Aggregation as the papers write it: lists, loops and means."""
    bounds = batch.cu_seqlens.tolist()
    sequences = []
    for s in range(batch.num_sequences):
        span = range(bounds[s], bounds[s + 1])
        sequences.append([float(losses[t]) for t in span if batch.loss_mask[t]])
    live = [values for values in sequences if values]
    if not live:
        return 0.0
    if mode == "token_mean":
        tokens = [x for values in live for x in values]
        return sum(tokens) / len(tokens)
    if mode == "seq_mean_token_mean":
        return sum(sum(v) / len(v) for v in live) / len(live)
    if mode == "seq_mean_token_sum":
        return sum(sum(v) for v in live) / len(live)
    if mode == "seq_mean_token_sum_norm":
        return sum(sum(v) / LENGTH for v in live) / len(live)
    prompts: dict[int, list[float]] = {}
    for group, values in zip(batch.group_index.tolist(), sequences, strict=True):
        prompts.setdefault(group, []).extend(values)
    means = [sum(v) / len(v) for v in prompts.values() if v]
    return sum(means) / len(means)


@pytest.mark.parametrize(
    ("mode", "per_token"),
    [
        # 7 masked tokens in sequences of 3, 1, 0 and 3; prompts of 4 and 3.
        ("token_mean", [1 / 7, 1 / 7, 1 / 7]),
        ("seq_mean_token_mean", [1 / 9, 1 / 3, 1 / 9]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq_mean_token_sum_norm", [1 / 24, 1 / 24, 1 / 24]),
        ("prompt_mean", [1 / 8, 1 / 8, 1 / 6]),
    ],
)
def test_weights_by_hand(make_batch, mode, per_token):
    first, second, fourth = per_token
    expected = [0, first, first, first, 0, 0, second, 0, 0, 0, fourth, 0, fourth, fourth]
    weights = weights_of(make_batch(MASKS, GROUPS), mode)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masks", [[], [[0, 0, 0]], [[0], [0, 0]]])
def test_nothing_masked_weighs_zero(make_batch, mode, masks):
    batch = make_batch(masks)
    weights = weights_of(batch, mode)
    assert weights.tolist() == [0.0] * batch.num_tokens


@st.composite
def batches(draw):
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=8))
    masks = [[0, *mask[1:]] for mask in masks]
    groups = draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    return masks, groups, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("mode", MODES)
@given(drawn=batches())
def test_equals_the_loop(make_batch, mode, drawn):
    masks, groups, seed = drawn
    batch = make_batch(masks, groups)
    losses = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    total = float((weights_of(batch, mode) * losses).sum())
    assert total == pytest.approx(loop_aggregate(batch, losses, mode), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(drawn=batches(), data=st.data())
def test_splits_order_and_padding_change_nothing(make_batch, mode, drawn, data):
    """Parts of any shape (micro-batches of ranks) add up; sequences in any order, and with padding, weigh the same."""
    masks, groups, seed = drawn
    batch = make_batch(masks, groups)
    losses = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)).double()
    weights = weights_of(batch, mode)
    whole = float((weights * losses).sum())

    prepared = replace(batch, token_data={"loss_weight": weights, "losses": losses})
    order = data.draw(st.permutations(range(len(masks))))
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    parts = [prepared.select([i for i in order if part_of[i] == part]) for part in range(4)]
    total = sum(float((part.token_data["loss_weight"] * part.token_data["losses"]).sum()) for part in parts)
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-12)

    shuffled = batch.select(order)
    torch.testing.assert_close(weights_of(shuffled, mode), prepared.select(order).token_data["loss_weight"])

    padded = make_batch([[*mask, 0, 0, 0] for mask in masks], groups)
    kept = torch.cat([torch.tensor([True] * len(mask) + [False] * 3) for mask in masks])
    torch.testing.assert_close(weights_of(padded, mode)[kept], weights)


def test_local_denominators_would_be_noticed(make_batch):
    """The property above has teeth: weights computed on each part do not add up to those of the whole."""
    batch = make_batch(MASKS, GROUPS)
    local = torch.cat([aggregation_weights(batch.select(part), "token_mean") for part in ([0], [1, 2, 3])])
    assert not torch.allclose(local, aggregation_weights(batch, "token_mean"))


@pytest.mark.parametrize("length", [None, 0])
def test_constant_length_is_required(make_batch, length):
    with pytest.raises(ValueError, match=f"constant_length is {length}, it must be at least 1"):
        aggregation_weights(make_batch(MASKS), "seq_mean_token_sum_norm", constant_length=length)


def test_constant_length_is_refused_elsewhere(make_batch):
    with pytest.raises(ValueError, match="constant_length=5 has no meaning for aggregation token_mean"):
        aggregation_weights(make_batch(MASKS), "token_mean", constant_length=5)
