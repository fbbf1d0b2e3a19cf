"""A step policy: ends a run that has reached its goal, or no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_algorithms.decision_options import EarlyStopOptions
from chatlearn_core.protocols import Decision, StepPolicy


class EarlyStop(StepPolicy):
    """Counts measurements of one metric since its best value."""

    def __init__(self, options: EarlyStopOptions) -> None:
        self.options = options
        self._best: float | None = None
        self._since_best = 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        """Stop when the metric reaches the goal, or has not improved for ``patience`` measurements."""
        options = self.options
        value = metrics.get(options.metric)
        if value is None:
            return None
        sign = 1.0 if options.mode == "max" else -1.0
        if options.goal is not None and sign * value >= sign * options.goal:
            return Decision(stop=f"{options.metric} is {value:g} and its goal {options.goal:g}")
        if self._best is None or sign * (value - self._best) > options.min_improvement:
            self._best, self._since_best = value, 0
            return None
        self._since_best += 1
        if self._since_best < options.patience:
            return None
        return Decision(
            stop=f"{options.metric} has not improved on {self._best:g} in its last {self._since_best} measurements"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "since_best": self._since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._since_best = state["best"], state["since_best"]
