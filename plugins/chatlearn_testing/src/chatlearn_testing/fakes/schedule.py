"""A schedule that rises by the same amount in each step."""

from __future__ import annotations

from chatlearn_testing.fakes.options import FakeScheduleOptions


class FakeSchedule:
    """Implements ``chatlearn_core.protocols.Schedule``."""

    def __init__(self, options: FakeScheduleOptions) -> None:
        self.options = options

    def value(self, step: int) -> float:
        return self.options.start + self.options.per_step * step
