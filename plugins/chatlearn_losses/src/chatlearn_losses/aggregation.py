"""Aggregation of per-token losses, expressed as weights that hold the global denominator.

A loss is ``(weight * per_token).sum()``. The weights are computed once, on the whole global mini-batch, and accompany
the tokens, so the partial sums of micro-batches and ranks add up to the same number for every split of the batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from chatlearn_core.types import TrainBatch

AggregationMode = Literal[
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "prompt_mean",
]
"""How to aggregate the per-token losses of a mini-batch; m is the loss mask, S the sequences and P the prompts with
at least one masked token.

- ``token_mean``: sum / number of masked tokens (DAPO, arXiv 2503.14476).
- ``seq_mean_token_mean``: mean over S of each sequence's token mean (GRPO, arXiv 2402.03300, eq. 3).
- ``seq_mean_token_sum``: mean over S of each sequence's token sum.
- ``seq_mean_token_sum_norm``: ``seq_mean_token_sum`` divided by a constant length (Dr.GRPO, arXiv 2503.20783).
- ``prompt_mean``: mean over P of the token mean over all completions of a prompt.
"""


def aggregation_weights(batch: TrainBatch, mode: AggregationMode, *, constant_length: int | None = None) -> Tensor:
    """Weight of each token's loss in the mini-batch.

    Args:
        batch: the whole global mini-batch, before any split.
        mode: see ``AggregationMode``.
        constant_length: tokens; required by ``seq_mean_token_sum_norm`` and refused by the others.

    Returns:
        [T] float32, 0 outside the loss mask. Sequences and prompts without a masked token do not count; where nothing
        is masked all weights are 0.

    Raises:
        ValueError: ``constant_length`` is missing, below 1, or given to a mode that does not use it.
    """
    if mode == "seq_mean_token_sum_norm":
        if constant_length is None or constant_length < 1:
            raise ValueError(
                f"aggregation seq_mean_token_sum_norm divides by a constant length: constant_length is "
                f"{constant_length!r}, it must be at least 1"
            )
    elif constant_length is not None:
        raise ValueError(f"constant_length={constant_length} has no meaning for aggregation {mode}; leave it out")

    # float64: a count of tokens beyond 2^24 is not exact in float32.
    mask = batch.loss_mask.double()
    sequence = batch.sequence_index
    tokens_of_sequence = mask.new_zeros(batch.num_sequences).index_add_(0, sequence, mask)
    num_sequences = (tokens_of_sequence > 0).sum().clamp(min=1)
    if mode == "token_mean":
        weights = mask / mask.sum().clamp(min=1)
    elif mode == "seq_mean_token_mean":
        weights = mask / (num_sequences * tokens_of_sequence.clamp(min=1)[sequence])
    elif mode == "seq_mean_token_sum":
        weights = mask / num_sequences
    elif mode == "seq_mean_token_sum_norm":
        assert constant_length is not None
        weights = mask / (num_sequences * constant_length)
    else:
        _, prompt_of_sequence = torch.unique(batch.group_index.to(mask.device), return_inverse=True)
        prompt = prompt_of_sequence[sequence]
        tokens_of_prompt = mask.new_zeros(batch.num_sequences).index_add_(0, prompt, mask)
        num_prompts = (tokens_of_prompt > 0).sum().clamp(min=1)
        weights = mask / (num_prompts * tokens_of_prompt.clamp(min=1)[prompt])
    return weights.float()
