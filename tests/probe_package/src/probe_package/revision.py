"""Remarks to the policy between its answers."""

from dataclasses import replace

import numpy as np

from chatlearn_core.types import Sample


def remark_on(samples: list[Sample], token: int) -> list[Sample]:
    """A remark behind each sample of a group: ``token`` for the best of them, the next token for the others."""
    best = max(
        sample.reward.value for sample in samples if sample.reward is not None and sample.reward.value is not None
    )
    return [
        replace(sample, token_ids=np.append(sample.token_ids, token if sample.reward.value == best else token + 1))
        for sample in samples
        if sample.reward is not None
    ]
