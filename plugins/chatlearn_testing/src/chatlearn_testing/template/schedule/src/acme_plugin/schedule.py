"""The schedule ``acme``."""

from __future__ import annotations

import math

from acme_plugin.options import AcmeOptions


class AcmeSchedule:
    """``start + (end - start) (1 - cos(pi t)) / 2`` with t from 0 at ``first_step`` to 1 at ``last_step``.

    Implements ``chatlearn_core.protocols.Schedule``: a value depends on the step alone.
    """

    def __init__(self, options: AcmeOptions) -> None:
        self.options = options

    def value(self, step: int) -> float:
        """The value in a step; steps count from 1."""
        options = self.options
        progress = (step - options.first_step) / (options.last_step - options.first_step)
        progress = min(1.0, max(0.0, progress))
        share = (1.0 - math.cos(math.pi * progress)) / 2.0
        return options.start * (1.0 - share) + options.end * share
