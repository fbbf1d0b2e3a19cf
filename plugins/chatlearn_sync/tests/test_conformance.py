"""Both transports pass the conformance suite."""

from __future__ import annotations

from chatlearn_core.testing.suites import WeightSyncConformance


class TestDirect(WeightSyncConformance):
    backend = "direct"


class TestCheckpoint(WeightSyncConformance):
    backend = "checkpoint"
