"""The state of a run: what a checkpoint stores besides the roles' own state, and what was saved last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import CheckpointError
from chatlearn_core.executor.alarms import Alarms
from chatlearn_core.executor.checkpoint import Checkpoint
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.protocols.decisions import Stateful

COUNTED = (
    *("samples/admitted", "samples/total", "samples/trained", "samples/excluded"),
    *("rollout/discarded_tokens", "perf/trained_tokens"),
)
"""Metrics summed over the whole run, in checkpoints and in the summary."""


@dataclass(slots=True)
class RunState:
    """The executor's own state that changes from step to step.

    A checkpoint always represents a completed step, even if the next one has begun: ``complete`` keeps its content.
    """

    parts: Mapping[str, Stateful]
    """Stateful parts by their name in checkpoints."""
    step: int = 0
    """Last completed step."""
    policy_version: int = 0
    """Version of the policy's weights that the generators serve: the number of its weight syncs."""
    stopped: str | None = None
    """Reason why a step policy ended the run before its last step."""
    before: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before training."""
    after: dict[str, float] = field(default_factory=dict)
    """Metrics of the latest evaluation since."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0.0))
    line: dict[str, float] = field(default_factory=dict)
    """Metrics of the last completed step."""
    alarms: Alarms = field(default_factory=Alarms)
    pending: tuple[Group, ...] = ()
    """Rollouts that were unfinished when the step was complete."""
    buffered: RolloutBuffer | None = None
    """Finished rollouts that waited for a later step; None if there were none."""
    policy_changed: bool = False
    """Whether updates of an incomplete step were made: then the weights match no completed step."""
    saved_step: int = -1
    saved_path: Path | None = None
    """The checkpoint of that step; in another run's directory if ``--resume PATH`` named one there."""
    _initial: dict[str, dict[str, Any]] = field(init=False)
    _states: dict[str, dict[str, Any]] = field(init=False)
    """States of the parts when the step was complete."""

    def __post_init__(self) -> None:
        self.parts = {**self.parts, "alarms": self.alarms}
        self._initial = self._states = self._states_now()

    def _states_now(self) -> dict[str, dict[str, Any]]:
        return {name: deepcopy(part.state_dict()) for name, part in self.parts.items()}

    def complete(
        self, step: int, line: dict[str, float], pending: tuple[Group, ...] = (), buffer: RolloutBuffer | None = None
    ) -> None:
        """Record that ``step`` is complete, its metrics, and the rollouts left for later steps."""
        for name in COUNTED:
            self.totals[name] += line.get(name, 0.0)
        self.step, self.policy_changed, self.line, self.pending = step, False, line, pending
        self.buffered = None if buffer is None else buffer.copy()
        self._states = self._states_now()

    def content(self, settings: Mapping[str, Any], metric: str) -> dict[str, Any]:
        """The content that a checkpoint stores of this state.

        Args:
            settings: the resolved configuration, with which a resumed run is compared.
            metric: name of the metric that ranks checkpoints.

        Raises:
            CheckpointError: the state of a part does not consist of JSON values.
        """
        for name, state in self._states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"the state of the run's {name} is not made of JSON values: {error}. Correct its state_dict()"
                ) from error
        return {
            "config": settings,
            "stopped": self.stopped,
            "policy_version": self.policy_version,
            "totals": self.totals,
            "eval_before": self.before,
            "eval_after": self.after,
            "metric": self.line.get(metric),
            **self._states,
        }

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Restore the state of a checkpoint. A run that stops before its roles are up then has lost nothing."""
        content = checkpoint.state
        self._load({name: content.get(name, initial) for name, initial in self._initial.items()})
        self.before, self.after = dict(content["eval_before"]), dict(content["eval_after"])
        self.totals = dict.fromkeys(COUNTED, 0.0) | content["totals"]
        self.policy_version, self.stopped = content["policy_version"], content["stopped"]
        self.step = self.saved_step = checkpoint.step
        self.saved_path = checkpoint.path
        self._start_over()

    def begin_again(self) -> None:
        """Be where a run begins."""
        self._load(self._initial)
        self.before, self.after, self.totals = {}, {}, dict.fromkeys(COUNTED, 0.0)
        self.policy_version, self.step, self.stopped = 0, 0, None
        self.saved_step, self.saved_path = -1, None
        self._start_over()

    def _load(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(deepcopy(states[name]))
        self._states = self._states_now()

    def _start_over(self) -> None:
        """Forget everything recorded about steps that are repeated."""
        self.line, self.pending, self.buffered = {}, (), None
