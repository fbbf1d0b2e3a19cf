"""Settings of ``chatlearn plugins check chatlearn-observe``; no run imports them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def tensorboard_scalars(run_dir: Path) -> Iterable[tuple[int, str, float]]:
    """Step, name and value of every scalar that TensorBoard would show."""
    events = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, name, event.value


SETTINGS: dict[str, dict[str, Any]] = {"logger/tensorboard": {"read_back": tensorboard_scalars}}
