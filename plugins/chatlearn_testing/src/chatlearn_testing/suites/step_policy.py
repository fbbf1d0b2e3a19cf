"""The contract of a step policy: valid decisions that follow from the metrics of the steps so far, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Decision
from chatlearn_testing.json_state import stored
from chatlearn_testing.suites.decisions import Ask, StatefulDecisionSuite

MAX_TOKENS = "max_tokens"
"""The only sampling parameter that a policy may change."""
OTHER_METRICS: Mapping[str, float] = {
    "loss": -0.25,
    "reward/mean": 0.5,
    "perf/step_s": 1.5,
    "samples/excluded/long": 0.0,
}
"""Metrics that steps have beside those of the cases."""
ODD_VALUES = (math.nan, math.inf, -math.inf)
Question = tuple[int, Mapping[str, float]]


@dataclass(slots=True, frozen=True)
class StepCase:
    """The metrics of one step, and what the policy decides after it."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Those that the policy reads; the suite adds others."""
    stop: str | None = None
    """Text that the reason to end the run contains; None: the run goes on."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that it changes."""
    adds: Mapping[str, float] = field(default_factory=dict)
    """The metrics that it adds."""


def decision_after(policy: Any, question: Question) -> Any:
    """What the policy decides, as plain values; None if nothing."""
    decision = policy.after_step(*question)
    if not isinstance(decision, Decision):
        return decision
    return decision.stop, dict(decision.sampling), dict(decision.metrics)


class StepPolicyConformance(StatefulDecisionSuite):
    """Contract tests that every step policy must pass.

    A subclass sets ``backend``, ``options`` and ``cases``: consecutive steps from 1, in some of which it reacts.
    """

    kind: ClassVar[Kind] = "step_policy"
    settable: ClassVar[frozenset[str]] = frozenset({"cases"})
    cases: ClassVar[Sequence[StepCase]]
    methods: ClassVar[tuple[str, ...]] = ("after_step", "state_dict", "load_state_dict")
    ask: ClassVar[Ask] = staticmethod(decision_after)

    def questions(self) -> Sequence[Question]:
        return [(step, {**OTHER_METRICS, **case.metrics}) for step, case in enumerate(self.cases, 1)]

    def test_cases_hold_a_reaction(self) -> None:
        """The cases can tell a policy that never reacts from one that works."""
        assert any(case.stop is not None or case.sampling or case.adds for case in self.cases), (
            "set cases: steps of a run, in at least one of which the policy stops it, changes sampling or adds a metric"
        )

    def test_decisions_are_those_of_the_cases(self) -> None:
        """After each step it decides what the case says."""
        policy = self._made()
        for case, (step, metrics) in zip(self.cases, self.questions(), strict=True):
            decision = policy.after_step(step, metrics) or Decision()
            if case.stop is None:
                assert decision.stop is None, f"it stops after step {step}: {decision.stop!r}"
            else:
                assert decision.stop is not None, f"it does not stop after step {step}"
                assert case.stop in decision.stop, f"the reason {decision.stop!r} lacks {case.stop!r}"
            assert dict(decision.sampling) == dict(case.sampling), f"step {step}: sampling {dict(decision.sampling)}"
            found, expected = dict(decision.metrics), dict(case.adds)
            assert found == pytest.approx(expected), f"step {step} adds {found}, not {expected}"

    def test_decisions_are_valid(self) -> None:
        """A decision is None or a ``Decision``: a reason in one line, whole ``max_tokens`` from 1, finite metrics with
        names that the step has not.
        """
        policy = self._made()
        for step, metrics in self.questions():
            self._assert_valid(policy.after_step(step, metrics), metrics, f"after step {step}")

    def test_metrics_may_be_of_any_mapping(self) -> None:
        """Metrics are a ``Mapping``: one that cannot be changed gets the same decisions."""
        one, other, ask = self._made(), self._made(), type(self).ask
        for step, metrics in self.questions():
            found = ask(one, (step, MappingProxyType(dict(metrics))))
            expected = ask(other, (step, dict(metrics)))
            assert found == expected, f"after step {step} it decides {found} instead of {expected}"

    def test_missing_metrics_are_taken_or_refused(self) -> None:
        """Not every step has every metric: evaluations, for example, are not in every step. A step without a metric
        that the policy reads is no reaction, or a ``ChatLearnError`` that names the metric; never a ``KeyError``.
        """
        names = sorted({name for case in self.cases for name in case.metrics})
        for missing in ([], *([name] for name in names)):
            policy = self._made()
            for step, metrics in self.questions():
                kept = {name: value for name, value in metrics.items() if missing and name not in missing}
                what = f"step {step} without {missing or 'any metric'}"
                try:
                    decision = policy.after_step(step, kept)
                except ChatLearnError as error:
                    if not any(name in str(error) for name in names):
                        raise AssertionError(f"{what}: {str(error)!r} names no metric") from error
                    break
                except Exception as error:
                    raise AssertionError(f"{what} raises {error!r}") from error
                self._assert_valid(decision, kept, what)
                self._storable(policy, what)

    def test_odd_metrics_do_no_harm(self) -> None:
        """NaN and infinity in any step are no error and make no metric that is not finite, and the state can still be
        stored: one bad step must not end a run at its next checkpoint.
        """
        for odd in ODD_VALUES:
            for at in range(len(self.cases)):
                policy = self._made()
                for number, (step, metrics) in enumerate(self.questions()):
                    given = dict.fromkeys(metrics, odd) if number == at else metrics
                    what = f"metrics of {odd} in step {at + 1}: step {step}"
                    try:
                        decision = policy.after_step(step, given)
                    except Exception as error:
                        raise AssertionError(f"{what} raises {error!r}") from error
                    self._assert_valid(decision, given, what)
                    self._storable(policy, what)

    def test_it_still_reacts_after_an_odd_step(self) -> None:
        """After a first step whose metrics are not finite, the policy reacts to later ones: NaN in its state would
        make it blind.
        """
        for odd in ODD_VALUES:
            policy = self._made()
            policy.after_step(1, dict.fromkeys(self.questions()[0][1], odd))
            reactions = [policy.after_step(step + 1, metrics) for step, metrics in self.questions()]
            reacts = any(decision is not None and decision != Decision() for decision in reactions)
            assert reacts, f"after a step whose metrics are {odd}, it never reacts again"

    # Internal methods

    def _storable(self, policy: Any, what: str) -> None:
        try:
            stored(policy.state_dict())
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error

    def _assert_valid(self, decision: Any, metrics: Mapping[str, float], what: str) -> None:
        if decision is None:
            return
        assert isinstance(decision, Decision), f"{what}: returned {decision!r:.100}, not a Decision or None"
        if decision.stop is not None:
            assert isinstance(decision.stop, str), f"{what}: the reason {decision.stop!r} is no text"
            assert decision.stop.strip(), f"{what}: the reason is empty"
            assert "\n" not in decision.stop, f"{what}: the reason {decision.stop!r} has several lines"
        for values in (decision.sampling, decision.metrics):
            assert isinstance(values, Mapping), f"{what}: {values!r:.80} is no mapping"
        others = sorted(set(decision.sampling) - {MAX_TOKENS})
        assert not others, f"{what}: sampling.{others[0]} may not change during a run"
        length = decision.sampling.get(MAX_TOKENS, 1)
        assert isinstance(length, int | float), f"{what}: max_tokens is {length!r}"
        assert math.isfinite(length), f"{what}: max_tokens is {length!r}"
        assert length >= 1, f"{what}: max_tokens is {length!r}"
        for name, value in decision.metrics.items():
            assert isinstance(name, str), f"{what}: a metric's name is {name!r}"
            assert name not in metrics, f"{what}: the step has a metric {name!r} already"
            assert isinstance(value, int | float), f"{what}: the metric {name!r} is {value!r}"
            assert math.isfinite(value), f"{what}: the metric {name!r} is {value!r}"
