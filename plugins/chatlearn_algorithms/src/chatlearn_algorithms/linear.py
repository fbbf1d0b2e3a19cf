"""A schedule that interpolates linearly between two values."""

from __future__ import annotations

from chatlearn_algorithms.decision_options import LinearOptions


class Linear:
    """start + (end − start) (step − first_step) / (last_step − first_step), constant before and after the two steps."""

    def __init__(self, options: LinearOptions) -> None:
        self.options = options

    def value(self, step: int) -> float:
        """Return the value in a step; steps count from 1."""
        options = self.options
        progress = (step - options.first_step) / (options.last_step - options.first_step)
        return options.start + (options.end - options.start) * min(1.0, max(0.0, progress))
