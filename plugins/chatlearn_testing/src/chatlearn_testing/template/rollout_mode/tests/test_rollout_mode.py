from __future__ import annotations

from chatlearn_testing.suites import RolloutModeConformance


class TestConformance(RolloutModeConformance):
    backend = "acme"
