"""The contract of a schedule: a finite number that depends on the step alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from chatlearn_core.plugins.records import Kind
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.decisions import Ask, DecisionSuite

STEPS = (*range(1, 41), 99, 100, 101, 1_000, 10_000, 1_000_000)
"""Steps of short and long runs."""


def value_in(schedule: Any, step: int) -> Any:
    """What the schedule says of a step."""
    return schedule.value(step)


class ScheduleConformance(DecisionSuite):
    """Contract tests that every schedule must pass.

    A subclass sets ``backend``, ``options`` and ``values``; and ``bounds`` and ``bad_options`` if there are any.
    """

    kind: ClassVar[Kind] = "schedule"
    settable: ClassVar[frozenset[str]] = frozenset({"values", "bounds"})
    values: ClassVar[Mapping[int, float]]
    """Step -> its value, exact to float64's rounding: the first and last step of each part of the schedule."""
    bounds: ClassVar[tuple[float, float] | None] = None
    """Smallest and largest value in any step; None: there are none."""
    methods: ClassVar[tuple[str, ...]] = ("value",)
    ask: ClassVar[Ask] = staticmethod(value_in)

    def questions(self) -> Sequence[int]:
        near = {step + offset for step in self.values for offset in (-1, 0, 1)}
        return sorted(step for step in {*STEPS, *near} if step >= 1)

    def test_values_are_those_expected(self) -> None:
        """Each step in ``values`` has its value."""
        assert self.values, "set values: steps and their values"
        schedule = self._made()
        for step, expected in self.values.items():
            found = schedule.value(step)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12), f"step {step} has {found!r}, not {expected}"

    def test_values_are_finite_numbers(self) -> None:
        """Every step of any run has a finite ``int`` or ``float``, also long after the schedule's last step."""
        schedule = self._made()
        for step in self.questions():
            value = schedule.value(step)
            assert isinstance(value, int | float), f"step {step} has {value!r:.80}, a {type(value).__name__}"
            assert not isinstance(value, bool), f"step {step} has {value!r}"
            assert math.isfinite(value), f"step {step} has {value!r}"

    def test_values_stay_within_the_bounds(self) -> None:
        """No step has a value outside ``bounds``: nothing else checks scheduled options of an algorithm."""
        if self.bounds is None:
            not_applicable("the suite sets no bounds")
        smallest, largest = self.bounds
        schedule = self._made()
        for step in self.questions():
            value = schedule.value(step)
            assert smallest <= value <= largest, f"step {step} has {value!r}, not from {smallest} to {largest}"

    def test_a_value_depends_on_the_step_alone(self) -> None:
        """Steps may be asked in any order and again, by the driver and by workers, and by a run that resumes in the
        middle: a schedule holds no state.
        """
        steps = self.questions()
        used, expected = self._made(), {step: self._made().value(step) for step in steps}
        for order in (steps, steps[::-1], [*steps[::2], *steps[1::2]], [step for step in steps for _ in range(3)]):
            for step in order:
                found = used.value(step)
                assert found == expected[step], f"step {step} had {expected[step]!r} and has {found!r} after others"
