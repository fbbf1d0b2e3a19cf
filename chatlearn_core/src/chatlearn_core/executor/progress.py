"""Listeners to a run's progress, in addition to its files: the progress bar of the command line, and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from chatlearn_core.executor.phases import Phase


class RunListener:
    """Receives everything a user would want to see; every method is optional to override."""

    def started(self, run_dir: Path, total_steps: int, first_step: int) -> None:
        """Roles are up; training begins with ``first_step``."""

    def phase(self, step: int, phase: Phase) -> None:
        """A phase begins; ``step`` is the step in progress, 0 before the first."""

    def phases_changed(self, step: int, phases: Sequence[Phase]) -> None:
        """The set of phases in progress has changed; ``phases`` are in the order in which they began."""

    counts_tokens = False
    """Whether ``sampled`` is called; counting has a small cost for generators."""

    def sampled(self, num_tokens: int) -> None:
        """Generators have sampled this many more tokens; not called for generators that do not stream."""

    def message(self, text: str) -> None:
        """A message that the user should read."""

    def warning(self, text: str) -> None:
        """A warning that calls for action by the user."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete; ``metrics`` is its line of ``metrics.jsonl``."""

    def finished(self, summary: Mapping[str, object]) -> None:
        """The run is over, successfully or not."""
