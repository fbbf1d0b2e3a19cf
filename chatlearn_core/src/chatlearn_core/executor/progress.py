"""Listeners to a run's progress, beside its files: the command line shows a progress bar, tests listen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from chatlearn_core.executor.phases import Phase


class RunListener:
    """Told everything a person would want to see; every method may be overridden, none has to be."""

    def started(self, run_dir: Path, total_steps: int, first_step: int) -> None:
        """Roles are up; training begins with ``first_step``."""

    def phase(self, step: int, phase: Phase) -> None:
        """The run begins to do this; ``step`` is the step that is being made, 0 before the first."""

    def phases_changed(self, step: int, phases: Sequence[Phase]) -> None:
        """All that the run does from now on, in the order in which it began."""

    counts_tokens = False
    """Whether ``sampled`` is called, which costs generators a little."""

    def sampled(self, num_tokens: int) -> None:
        """Generators have sampled this many more tokens; those that do not stream say nothing."""

    def message(self, text: str) -> None:
        """Something a person should read."""

    def warning(self, text: str) -> None:
        """Something a person should do something about."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete; ``metrics`` is its line of ``metrics.jsonl``."""

    def finished(self, summary: Mapping[str, object]) -> None:
        """The run is over, well or not."""
