"""What is known about a run that failed, for observers."""

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
    """Such as ``generating``; of phases that overlap, the one of the role at fault."""
    phase_s: float
    """Seconds that the run was in the phase."""
    step: int
    """The step that the run was in; 0 before the first."""
    num_complete: int
    """Complete steps."""
    planned_steps: int
    kept: str
    """What is saved, in a sentence."""
    run_dir: Path
    events: tuple[Mapping[str, Any], ...]
    """The newest lines of ``events.jsonl``, oldest first."""
    wall_s: float
    """Seconds since the start."""
    versions: Mapping[str, str]
    """Of Python, torch, and every distribution with a plugin in use."""
