"""The logger ``wandb``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_observe.options import WandbOptions

_ID = re.compile(r"[\w-]+", re.ASCII)
ID_FILE = "wandb_id"
"""File in the run directory with wandb's id of the run, with which a resume continues the same run."""


class WandbLogger:
    """Sends every metric to Weights & Biases, or writes it to the run directory (``mode: offline``).

    wandb's own step counter cannot go back, and drops steps that a resumed run repeats. The step number is therefore
    logged as the metric ``step``, the x-axis of all other metrics.
    """

    def __init__(self, options: WandbOptions, run_dir: Path) -> None:
        self.options = options
        self.run_dir = run_dir
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Start or continue the wandb run of this run directory.

        Raises:
            ChatLearnError: wandb does not start (no login, no network, no permission); has wandb's message.
        """
        options = self.options
        given = options.model_dump(exclude={"id", "tags", "name", "mode"}, exclude_none=True)
        try:
            self._run = wandb.init(
                **given,
                name=options.name or config.get("name"),
                tags=options.tags or None,
                mode=options.mode,
                id=options.id or self._earlier_id(),
                resume="allow",
                dir=str(self.run_dir),
                config=dict(config),
            )
        except (wandb.Error, OSError) as error:
            raise ChatLearnError(
                f"the logger 'wandb' (project {options.project!r}, log.loggers) does not start: {error}. Log in with "
                "`wandb login`, or set its option mode: offline and upload later with `wandb sync`"
            ) from error
        (self.run_dir / ID_FILE).write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Wait until everything is sent or written. A repeated call does nothing."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _earlier_id(self) -> str | None:
        try:
            text = (self.run_dir / ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # missing or unreadable: start a new wandb run
            return None
        return text if _ID.fullmatch(text) else None  # ignore a truncated file
