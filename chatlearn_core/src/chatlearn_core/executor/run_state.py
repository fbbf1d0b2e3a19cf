"""Where a run stands: what a checkpoint keeps beside the roles' own state, and as what it was saved last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatlearn_core.data import Sampler
from chatlearn_core.executor.alarms import Alarms
from chatlearn_core.executor.checkpoint import Checkpoint
from chatlearn_core.executor.rollouts.pending import Group

COUNTED = ("samples/total", "samples/trained", "samples/excluded", "perf/trained_tokens")
"""Metrics that are added up over the whole run, in checkpoints and in the summary."""


@dataclass(slots=True)
class RunState:
    """Everything that changes from step to step in the executor itself."""

    sampler: Sampler
    step: int = 0
    """Last completed step."""
    before: dict[str, float] = field(default_factory=dict)
    """The evaluation before training."""
    after: dict[str, float] = field(default_factory=dict)
    """The newest evaluation since."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    line: dict[str, float] = field(default_factory=dict)
    """Metrics of the last completed step."""
    alarms: Alarms = field(default_factory=Alarms)
    pending: tuple[Group, ...] = ()
    """Rollouts that go on in the next step; a checkpoint holds them beside the roles."""
    policy_changed: bool = False
    """Whether updates of an incomplete step have been made: then the weights match no completed step."""
    saved_step: int = -1
    saved_path: Path | None = None
    """The checkpoint of that step; in another run's directory where ``--resume PATH`` named one there."""

    def complete(self, step: int, line: dict[str, float], pending: tuple[Group, ...] = ()) -> None:
        """``step`` is done, with these metrics, and left these rollouts unfinished."""
        for name in COUNTED:
            self.totals[name] += line.get(name, 0.0)
        self.step, self.policy_changed, self.line, self.pending = step, False, line, pending

    def content(self, settings: Mapping[str, Any], metric: str) -> dict[str, Any]:
        """What a checkpoint stores of it.

        Args:
            settings: the resolved configuration, which a run that resumes is compared with.
            metric: name of the metric that ranks checkpoints.
        """
        return {
            "config": settings,
            "sampler": self.sampler.state_dict(),
            "policy_version": self.step,
            "totals": self.totals,
            "eval_before": self.before,
            "eval_after": self.after,
            "metric": self.line.get(metric),
        }

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Be where the checkpoint was taken. A run that stops before its roles are up has lost nothing then."""
        content = checkpoint.state
        self.sampler.load_state_dict(content["sampler"])
        self.before, self.after = dict(content["eval_before"]), dict(content["eval_after"])
        self.totals = dict(content["totals"])
        self.step = self.saved_step = checkpoint.step
        self.saved_path = checkpoint.path
