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
_ID = re.compile(r"[\w-]+", re.ASCII)
ID_FILE = "wandb_id"
"""In the run directory: wandb's id of the run, by which a resumed run goes on in the same one."""


class WandbLogger:
    """Sends every metric to Weights & Biases, or writes it to the run directory (``mode: offline``).

    wandb's own step counter only rises, and drops a step that a resumed run makes again. The number of the step is
    therefore logged as the metric ``step``, over which all others are drawn.
    """

    def __init__(self, options: WandbOptions, run_dir: Path) -> None:
        self.options = options
        self.run_dir = run_dir
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on in, the wandb run of this run directory.

        Raises:
            ChatLearnError: wandb does not start (no login, no network, no permission); holds its own words.
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
        """Send one step's numbers."""
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        """Wait until everything is sent or written. A second call does nothing."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _earlier_id(self) -> str | None:
        try:
            text = (self.run_dir / ID_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:  # none yet; another run of wandb is begun where it cannot be read
            return None
        return text if _ID.fullmatch(text) else None  # a write that was cut short leaves none
