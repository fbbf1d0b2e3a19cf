from __future__ import annotations

import asyncio

import pytest
from chatlearn_testing.suites import RolloutModeConformance
from chatlearn_testing.suites.rollout_mode_runs import ModeRuns
from pydantic import ValidationError

from acme_plugin.options import AcmeOptions


class TestConformance(RolloutModeConformance):
    backend = "acme"

    def test_the_first_steps_wait_for_their_own_rollouts(self, runs: ModeRuns) -> None:
        rollout = {"mode": "acme", "options": {"first_steps": 2}}
        asyncio.run(runs.make("first", rollout).train())
        ages = [line["rollout/staleness_max"] for line in runs.metrics("first")]
        assert ages == [0, 0, 0, 1, 1, 1]


def test_steps_are_counted_from_zero() -> None:
    with pytest.raises(ValidationError, match="first_steps"):
        AcmeOptions(first_steps=-1)
