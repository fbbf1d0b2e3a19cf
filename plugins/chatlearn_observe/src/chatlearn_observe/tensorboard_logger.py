"""The logger ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard.writer import SummaryWriter

from chatlearn_observe.options import TensorBoardOptions


class TensorBoardLogger:
    """Writes every metric as a scalar under its name, and the configuration as text.

    A resumed run repeats some steps. Its event file records the step at which it continues, and TensorBoard hides the
    content of earlier files from that step on.
    """

    def __init__(self, options: TensorBoardOptions, run_dir: Path) -> None:
        self.options = options
        self.directory = Path(options.directory) if options.directory else run_dir / "tensorboard"
        self._config: Mapping[str, Any] = {}
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Store the configuration; the first step opens the file, which needs the step's number."""
        self._config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step, including NaN and infinity."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the file. A repeated call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> SummaryWriter:
        writer = SummaryWriter(str(self.directory), purge_step=step, flush_secs=self.options.flush_s)
        if self._config:
            text = yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
            # In Markdown an indented block is shown verbatim.
            writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), step)
        return writer
