"""Data that an algorithm computes from a batch before training on it: advantages, returns, exclusions."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from chatlearn_core.types.metric import Metrics


@dataclass(slots=True, eq=False)
class Derived:
    """New data for a batch's sequences, aligned with the batch, and the sequences to exclude from training.

    Example:
        Two sequences of 3 and 2 tokens, T = 5; the second is excluded:
        Derived({"advantages": tensor([0.0, 0.7, 0.7, 0.0, 0.0])}, exclusions={"p7@0#1": "zero_spread_group"})
    """

    token_data: dict[str, Tensor] = field(default_factory=dict)
    """name -> [T, ...]"""
    sequence_data: dict[str, Tensor] = field(default_factory=dict)
    """name -> [S]"""
    exclusions: dict[str, str] = field(default_factory=dict)
    """Sample id -> reason why the sample is not trained on. Counted by reason."""
    metrics: Metrics = field(default_factory=dict)
    """Partial metrics: those of several slices of a batch are merged."""
