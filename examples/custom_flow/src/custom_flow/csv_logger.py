"""A logger that writes a table."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from custom_flow.options import CSVOptions


class CSVLogger:
    """Appends a row per step to ``metrics.csv`` in the run's directory; a metric that a step lacks stays empty."""

    def __init__(self, options: CSVOptions, run_dir: Path) -> None:
        self.metrics = options.metrics
        self.file = run_dir / "metrics.csv"

    def start(self, config: Mapping[str, Any]) -> None:
        """Write the header, unless a run that resumes has written it."""
        if not self.file.exists():
            self._write("step", *self.metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of one step."""
        self._write(step, *(metrics.get(name) for name in self.metrics))

    def close(self) -> None:
        """Nothing to release: every row is written at once."""

    def _write(self, *row: object) -> None:
        with self.file.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerow(row)
