"""The record of a failed run, for observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True, frozen=True)
class RunFailure:
    """The state of a run when an error stopped it."""

    name: str
    """The run's name."""
    phase: str
    """For example ``generating``; if phases overlapped, the phase of the role that failed."""
    phase_s: float
    """Seconds the run had spent in the phase."""
    step: int
    """The step in progress; 0 before the first."""
    num_complete: int
    """Number of complete steps."""
    planned_steps: int
    kept: str
    """One sentence that says what is saved."""
    run_dir: Path
    events: tuple[Mapping[str, Any], ...]
    """The latest lines of ``events.jsonl``, oldest first."""
    wall_s: float
    """Seconds since the run started."""
    versions: Mapping[str, str]
    """Versions of Python, torch, and every distribution whose plugins the run uses."""
