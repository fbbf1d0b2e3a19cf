"""Every transport passes the conformance suite, through each channel it declares."""

from __future__ import annotations

import pytest

from chatlearn_testing.suites import WeightSyncConformance


class TestDirect(WeightSyncConformance):
    backend = "direct"


class TestSharedMemoryByHandles(WeightSyncConformance):
    backend = "shared_memory"


@pytest.mark.slow
class TestSharedMemoryByTensors(WeightSyncConformance):
    backend = "shared_memory"
    channel = "tensors"


class TestSharedMemoryOfBoxes(WeightSyncConformance):
    backend = "shared_memory"
    export = "boxes"


@pytest.mark.slow
class TestSharedMemoryOfBoxesByTensors(WeightSyncConformance):
    backend = "shared_memory"
    export = "boxes"
    channel = "tensors"


class TestBroadcastByProcessGroup(WeightSyncConformance):
    backend = "broadcast"


@pytest.mark.slow
class TestBroadcastByTensors(WeightSyncConformance):
    backend = "broadcast"
    channel = "tensors"


class TestBroadcastOfBoxes(WeightSyncConformance):
    backend = "broadcast"
    export = "boxes"


@pytest.mark.slow
class TestBroadcastOfBoxesByTensors(WeightSyncConformance):
    backend = "broadcast"
    export = "boxes"
    channel = "tensors"


class TestDeltaByHandles(WeightSyncConformance):
    backend = "delta"


@pytest.mark.slow
class TestDeltaByTensors(WeightSyncConformance):
    backend = "delta"
    channel = "tensors"


class TestCheckpoint(WeightSyncConformance):
    backend = "checkpoint"


class TestCheckpointOfBoxes(WeightSyncConformance):
    backend = "checkpoint"
    export = "boxes"


@pytest.mark.slow
class TestCheckpointOfBoxesByTensors(WeightSyncConformance):
    backend = "checkpoint"
    export = "boxes"
    channel = "tensors"
