"""The suite for loggers on TensorBoard's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from chatlearn_testing.suites import LoggerConformance


def stored(run_dir: Path) -> Iterable[tuple[int, str, float]]:
    """Every scalar that TensorBoard would show."""
    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, name, event.value


class TestTensorBoard(LoggerConformance):
    backend = "tensorboard"
    read_back = stored
