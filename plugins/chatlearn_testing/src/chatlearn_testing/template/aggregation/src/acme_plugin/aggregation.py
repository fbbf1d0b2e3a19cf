"""The aggregation ``acme``: between the mean over sequences and the mean over tokens."""

from __future__ import annotations

import torch
from chatlearn_core.types import TrainBatch

from acme_plugin.options import AcmeOptions


def power_of_length(batch: TrainBatch, options: AcmeOptions) -> torch.Tensor:
    """[T] weight of each token's loss in the mini-batch: with n tokens to train on in sequence s and power p,
    n_s^(p - 1) / sum of n_s^p over the sequences that have such tokens; 0 outside ``loss_mask``.
    """
    mask = batch.loss_mask.double()  # float32 cannot count more than 2^24 tokens
    sequence = batch.sequence_index
    lengths = mask.new_zeros(batch.num_sequences).index_add_(0, sequence, mask)
    trained = lengths > 0
    powers = torch.where(trained, lengths.clamp(min=1) ** options.power, 0.0)
    per_token = powers / (lengths.clamp(min=1) * powers.sum().clamp(min=1))
    return (mask * per_token[sequence]).float()
