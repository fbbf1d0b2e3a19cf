"""A step policy: ends a run that has reached its goal, or no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from chatlearn_algorithms.decision_options import EarlyStopOptions
from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.protocols import Decision, StepPolicy


class EarlyStop(StepPolicy):
    """Counts measurements of one metric since its best value."""

    def __init__(self, options: EarlyStopOptions) -> None:
        self.options = options
        self._best: float | None = None
        self._since_best = 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        """Stop when the metric reaches the goal, or has not improved for ``patience`` measurements. A value that is not
        finite is a measurement without an improvement.
        """
        options = self.options
        value = metrics.get(options.metric)
        if value is None:
            return None
        sign, is_finite = (1.0 if options.mode == "max" else -1.0), math.isfinite(value)
        if options.goal is not None and is_finite and sign * value >= sign * options.goal:
            return Decision(stop=f"{options.metric} is {value:g} and its goal {options.goal:g}")
        if is_finite and (self._best is None or sign * (value - self._best) > options.min_improvement):
            self._best, self._since_best = value, 0
            return None
        self._since_best += 1
        if self._since_best < options.patience:
            return None
        best = "any value" if self._best is None else f"{self._best:g}"
        return Decision(stop=f"{options.metric} has not improved on {best} in its last {self._since_best} measurements")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "since_best": self._since_best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            best = None if state["best"] is None else float(state["best"])
            since_best = int(state["since_best"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of early_stop is damaged: {type(error).__name__}: {error}") from error
        self._best, self._since_best = best, since_best
