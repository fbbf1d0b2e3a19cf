"""Partial metrics: a sum and a count, so that merging over ranks and micro-batches is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatlearn_core.exceptions import BackendError

Reducer = Literal["mean", "sum", "max", "min"]


@dataclass(slots=True, frozen=True)
class Metric:
    """A partial metric. ``mean`` is ``total / count`` once all parts are merged; other reducers ignore ``count``."""

    total: float
    count: float = 1.0
    reducer: Reducer = "mean"

    def merge(self, other: Metric) -> Metric:
        """Combine two parts of the same metric, for example of two ranks or micro-batches."""
        assert self.reducer == other.reducer, f"cannot merge a {self.reducer} with a {other.reducer}"
        if self.reducer == "max":
            return Metric(max(self.total, other.total), 1.0, "max")
        if self.reducer == "min":
            return Metric(min(self.total, other.total), 1.0, "min")
        return Metric(self.total + other.total, self.count + other.count, self.reducer)

    @property
    def value(self) -> float:
        """The reduced number; a mean over nothing is 0."""
        if self.reducer == "mean":
            return self.total / self.count if self.count else 0.0
        return self.total


Metrics = dict[str, Metric]
"""Metric name -> partial metric."""


def merge_metrics(*parts: Metrics) -> Metrics:
    """Merge partial metrics by name; a name that occurs in only some parts is kept.

    Raises:
        BackendError: two parts of one metric have different reducers; names the metric and both reducers.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and merged[name].reducer != metric.reducer:
                raise BackendError(
                    f"Metric '{name}' is reported as a {merged[name].reducer} and as a {metric.reducer}: all parts of "
                    "one metric have one reducer. Give one of the two another name, where a loss or a backend makes it."
                )
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
