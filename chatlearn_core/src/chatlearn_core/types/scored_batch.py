"""Samples with their rewards as a batch: what an algorithm's advantages are computed of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chatlearn_core.types.batch import TrainBatch, pack_samples
from chatlearn_core.types.sample import Sample

REWARD = "reward"
"""Name of the rewards in ``sequence_data``."""
TOKEN_REWARDS = "token_rewards"
"""Name of the rewards of single tokens in ``token_data``."""


def scored_batch(samples: Sequence[Sample]) -> TrainBatch:
    """The samples as a batch, with ``sequence_data["reward"]``, [S] float64, where they have rewards, and with
    ``token_data["token_rewards"]``, [T] float32, where one of them has rewards of single tokens.
    """
    batch = pack_samples(samples)
    verdicts = [sample.reward for sample in samples]
    values = [None if verdict is None else verdict.value for verdict in verdicts]
    if samples and all(value is not None for value in values):
        batch.sequence_data[REWARD] = torch.tensor(values, dtype=torch.float64)
    if any(verdict is not None and verdict.token_values is not None for verdict in verdicts):
        rows = []
        for sample, verdict in zip(samples, verdicts, strict=True):
            row = np.zeros(len(sample.token_ids), np.float32)
            if verdict is not None and verdict.token_values is not None:
                row[sample.num_prompt_tokens :] = verdict.token_values
            rows.append(row)
        batch.token_data[TOKEN_REWARDS] = torch.from_numpy(np.concatenate(rows))
    return batch
