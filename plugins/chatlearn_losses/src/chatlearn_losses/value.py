"""The critic's loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """The loss of each token, and where the clip decided it."""

    per_token: Tensor
    """[T]"""
    clipped: Tensor
    """[T] bool: the clipped error is the larger one. Where V is outside the range, the token gives no gradient."""


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None) -> ValueLoss:
    """½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²), as PPO implementations clip values (arXiv 2005.12729).

    Args:
        values: [T] V, with gradient.
        old_values: [T] of the critic at the start of the step.
        returns: [T] R
        clip: ε; None: the plain squared error.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    near = torch.clamp(values, old_values - clip, old_values + clip)
    bounded = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(error, bounded), bounded > error)
