"""The logger ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.utils.tensorboard.writer import SummaryWriter

from chatlearn_observe.options import TensorBoardOptions


class TensorBoardLogger:
    """Writes every metric as a scalar of its own name, and the configuration as text.

    A resumed run writes some steps again. Its event file then begins with the step at which it went on, from which
    TensorBoard hides what earlier files hold.
    """

    def __init__(self, options: TensorBoardOptions, run_dir: Path) -> None:
        self.options = options
        self.directory = Path(options.directory) if options.directory else run_dir / "tensorboard"
        self._config: Mapping[str, Any] = {}
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Keep the configuration; the file is opened with the first step, whose number it must know."""
        self._config = config

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one step's numbers; NaN and infinity are written as such."""
        if self._writer is None:
            self._writer = self._open(step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is buffered. A second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, step: int) -> SummaryWriter:
        writer = SummaryWriter(str(self.directory), purge_step=step, flush_secs=self.options.flush_s)
        if self._config:
            text = yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
            # Markdown: an indented block is shown as it stands.
            writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), step)
        return writer
