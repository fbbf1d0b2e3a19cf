"""The aggregations of ``chatlearn_losses`` as plugins register them: ``function(batch, options) -> weights``."""

from __future__ import annotations

from torch import Tensor

from chatlearn_algorithms.aggregation_options import ConstantLengthOptions, NoAggregationOptions
from chatlearn_core.types import TrainBatch
from chatlearn_losses import aggregation_weights


def token_mean(batch: TrainBatch, options: NoAggregationOptions) -> Tensor:
    """[T] every token weighs the same."""
    return aggregation_weights(batch, "token_mean")


def seq_mean_token_mean(batch: TrainBatch, options: NoAggregationOptions) -> Tensor:
    """[T] the mean over sequences of the mean over a sequence's tokens."""
    return aggregation_weights(batch, "seq_mean_token_mean")


def seq_mean_token_sum(batch: TrainBatch, options: NoAggregationOptions) -> Tensor:
    """[T] the mean over sequences of the sum over a sequence's tokens."""
    return aggregation_weights(batch, "seq_mean_token_sum")


def seq_mean_token_sum_norm(batch: TrainBatch, options: ConstantLengthOptions) -> Tensor:
    """[T] the mean over sequences of the sum over a sequence's tokens, divided by a constant length."""
    return aggregation_weights(batch, "seq_mean_token_sum_norm", constant_length=options.constant_length)


def prompt_mean(batch: TrainBatch, options: NoAggregationOptions) -> Tensor:
    """[T] the mean over prompts of the mean over all tokens that were sampled for a prompt."""
    return aggregation_weights(batch, "prompt_mean")
