"""The adaptive KL controller: a coefficient that follows the distance to the reference."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ERROR = 0.2
"""Bound of the relative error in one update."""


@dataclass(slots=True)
class AdaptiveKL:
    """β ← β (1 + clip(KL / target − 1, ±0.2) · n / horizon) after n samples (arXiv 1909.08593, section 2.2)."""

    coef: float
    """β"""
    target: float
    horizon: int

    def update(self, kl: float, num_samples: float) -> None:
        """Adapt the coefficient to the KL of n samples. More samples than the horizon count as the horizon."""
        error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1.0 + error * min(num_samples / self.horizon, 1.0)
