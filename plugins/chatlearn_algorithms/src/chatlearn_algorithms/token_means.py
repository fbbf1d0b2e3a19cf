"""Metrics of a loss that are means over the tokens of its mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from chatlearn_core.types import Metric, Metrics


@dataclass(slots=True)
class TokenMeans:
    """Collects per-token numbers while a loss is computed, and sums them with one transfer to the host."""

    mask: Tensor
    """[T] bool: the tokens that count."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [T]"""
    distances: dict[str, Tensor] = field(default_factory=dict)
    """Name -> [T] differences of logprobs, as they are and not cut as the loss cuts them. A single token of probability
    0 would leave nothing of their means, so such tokens are left out and counted (``infinite_kl``)."""

    def metrics(self, **sums: Tensor) -> Metrics:
        """Means by sum and count; and ``sums``, numbers that add up over micro-batches."""
        finite = torch.stack([distance.isfinite() for distance in self.distances.values()]).all(0)
        values = self.values | {"infinite_kl": ~finite}
        counted = [(self.mask, of) for of in values.values()]
        counted += [(self.mask & finite, of) for of in self.distances.values()]
        totals = [torch.where(mask, of.detach(), 0).sum(dtype=torch.float64) for mask, of in counted]
        counts = [mask.sum(dtype=torch.float64) for mask in (self.mask, self.mask & finite)]
        on_host = torch.stack([*(of.detach().double() for of in sums.values()), *counts, *totals]).tolist()
        count, num_finite, *totals_on_host = on_host[len(sums) :]
        num_tokens = [count] * len(values) + [num_finite] * len(self.distances)
        means = zip((*values, *self.distances), totals_on_host, num_tokens, strict=True)
        return {
            **{name: Metric(total, reducer="sum") for name, total in zip(sums, on_host, strict=False)},
            **{name: Metric(total, number) for name, total, number in means},
        }
