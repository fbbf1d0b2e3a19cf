"""Samples packed as a batch with their rewards: the input of an algorithm's ``advantages``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from chatlearn_core.types.batch import TrainBatch, pack_samples
from chatlearn_core.types.sample import Sample

REWARD = "reward"
"""Name of the sample rewards in ``sequence_data``."""
TOKEN_REWARDS = "token_rewards"
"""Name of the per-token rewards in ``token_data``."""
STEP_ENDS = "step_ends"
"""Name of the marks of steps' last tokens in ``token_data``."""


def scored_batch(samples: Sequence[Sample], packed: TrainBatch | None = None) -> TrainBatch:
    """The samples as a batch that includes their rewards.

    ``sequence_data["reward"]``, [S] float64, is set if every sample has a reward; ``sequence_data["reward/<name>"]``,
    [S] float64, for each component that all these rewards have; ``token_data["token_rewards"]``, [T] float32, if at
    least one sample has per-token rewards; ``token_data["step_ends"]``, [T] bool, True at the last token of each step,
    if at least one sample has rewards of steps, which ``token_rewards`` holds at these tokens.

    Args:
        packed: these samples packed, to which the rewards are added; packed here by default.
    """
    batch = pack_samples(samples) if packed is None else packed
    verdicts = [sample.reward for sample in samples]
    values = [None if verdict is None else verdict.value for verdict in verdicts]
    if samples and all(value is not None for value in values):
        batch.sequence_data[REWARD] = torch.tensor(values, dtype=torch.float64)
        components = [{} if verdict is None else verdict.components for verdict in verdicts]
        for name in [name for name in components[0] if all(name in of_sample for of_sample in components)]:
            of_name = torch.tensor([of_sample[name] for of_sample in components], dtype=torch.float64)
            batch.sequence_data[f"{REWARD}/{name}"] = of_name
    if any(verdict is not None and verdict.token_values is not None for verdict in verdicts):
        rows = []
        for sample, verdict in zip(samples, verdicts, strict=True):
            row = np.zeros(len(sample.token_ids), np.float32)
            if verdict is not None and verdict.token_values is not None:
                row[sample.num_prompt_tokens :] = verdict.token_values
            rows.append(row)
        batch.token_data[TOKEN_REWARDS] = torch.from_numpy(np.concatenate(rows))
    if any(verdict is not None and verdict.step_ends is not None for verdict in verdicts):
        marks = []
        for sample, verdict in zip(samples, verdicts, strict=True):
            mark = np.zeros(len(sample.token_ids), np.bool_)
            if verdict is not None and verdict.step_ends is not None:
                mark[sample.num_prompt_tokens + np.asarray(verdict.step_ends)] = True
            marks.append(mark)
        batch.token_data[STEP_ENDS] = torch.from_numpy(np.concatenate(marks))
    return batch
