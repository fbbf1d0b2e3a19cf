"""The modes of this distribution pass the conformance suite."""

from __future__ import annotations

from chatlearn_async.conformance import SETTINGS
from chatlearn_testing.suites import RolloutModeConformance


class TestOneStepOff(RolloutModeConformance):
    backend = "one_step_off"


class TestAsync(RolloutModeConformance):
    backend = "async"


class TestRecorded(RolloutModeConformance):
    backend = "recorded"
    directory_option = SETTINGS["rollout_mode/recorded"]["directory_option"]
