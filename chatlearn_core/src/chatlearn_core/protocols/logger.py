"""Loggers: destinations of metrics in addition to ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Built as ``factory(options, run_dir)``."""

    def __init__(self, options: Any, run_dir: Path) -> None:
        """Store both; open nothing yet.

        Called: when a run starts; in the driver; once.
        """

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the destination; ``config`` is the resolved configuration.

        Called: before the first step, also of a run that resumes; in the driver; once.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step.

        Called: when a step's metrics are complete; in the driver; once per step.
        """

    def close(self) -> None:
        """Write what is left and release everything. Safe to call twice.

        Called: last; in the driver; once.
        """
