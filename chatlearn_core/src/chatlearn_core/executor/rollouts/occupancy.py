"""Idle fractions of replicas, relative to the time in which the fleet is busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chatlearn_core.types import Metric, Metrics

MAX_NAMED = 16
"""Larger fleets log only mean and maximum; up to this size each replica has a metric of its own."""


class Occupancy:
    """Measures the time that replicas are busy.

    Args:
        num_replicas: number of replicas in the fleet.
        clock: returns seconds.
        num_open: number of requests already open on each replica.
    """

    def __init__(self, num_replicas: int, clock: Callable[[], float], num_open: Sequence[int] = ()) -> None:
        self._clock = clock
        self._num_open = list(num_open) or [0] * num_replicas
        self._busy_s = [0.0] * num_replicas
        self._since = [clock() if count else 0.0 for count in self._num_open]
        """Per replica: when it became busy."""
        self._any_s = 0.0
        self._any_since = clock() if any(self._num_open) else 0.0
        """When the fleet became busy."""

    def opened(self, replica: int) -> None:
        """A request has started on the replica."""
        now = self._clock()
        if not any(self._num_open):
            self._any_since = now
        if not self._num_open[replica]:
            self._since[replica] = now
        self._num_open[replica] += 1

    def closed(self, replica: int) -> None:
        """A request ended there."""
        now = self._clock()
        self._num_open[replica] -= 1
        if not self._num_open[replica]:
            self._busy_s[replica] += now - self._since[replica]
        if not any(self._num_open):
            self._any_s += now - self._any_since

    def idle_shares(self) -> list[float]:
        """Per replica: idle fraction of the time in which the fleet was busy."""
        now = self._clock()
        total = self._any_s + (now - self._any_since if any(self._num_open) else 0.0)
        if not total:
            return []
        busy = [
            done + (now - since if count else 0.0)
            for done, since, count in zip(self._busy_s, self._since, self._num_open, strict=True)
        ]
        return [max(0.0, 1.0 - seconds / total) for seconds in busy]  # differences of clock readings are inexact

    def metrics(self, num_retries: int) -> Metrics:
        """``perf/replica_idle`` (mean), ``perf/replica_idle_max`` and, for small fleets, one metric per replica; none
        for a single replica. ``rollout/retries`` if there were any.
        """
        metrics: Metrics = {"rollout/retries": Metric(num_retries, reducer="sum")} if num_retries else {}
        shares = self.idle_shares() if len(self._num_open) > 1 else []
        if shares:
            metrics["perf/replica_idle"] = Metric(sum(shares), len(shares))
            metrics["perf/replica_idle_max"] = Metric(max(shares), reducer="max")
        if len(shares) <= MAX_NAMED:
            metrics |= {f"perf/replica_idle/{index}": Metric(share) for index, share in enumerate(shares)}
        return metrics
