"""Decisions that plugins make in a run: which examples are drawn, which samples are trained on, how settings change
over the steps, and how a run reacts to a step's metrics. The configuration selects them by name; they are
deterministic, and checkpoints hold their state. (Observers see the same data and change nothing.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from chatlearn_core.types import ExampleDraw, RewardResult, Sample

if TYPE_CHECKING:
    from chatlearn_core.data import Dataset


class Stateful(Protocol):
    """An object with state in checkpoints. Subclass it for the default: no state."""

    def state_dict(self) -> dict[str, Any]:
        """All state that has changed since construction, as JSON values.

        Called: for each checkpoint; in the driver; once per checkpoint.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Called: when a run resumes or returns to its last checkpoint; in the driver; once each time.

        Raises:
            CheckpointError: the state belongs to other data or settings.
        """


@dataclass(slots=True, frozen=True)
class SamplerContext:
    """The datasets and settings that a sampler draws with."""

    datasets: Sequence[Dataset]
    """At least one; none is empty."""
    seed: int
    """The run's seed; all randomness must derive from it."""
    shuffle: bool
    """``data.shuffle``"""


class ExampleSampler(Stateful, Protocol):
    """An endless stream of training examples. Built as ``factory(options, SamplerContext)``."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Dataset name -> number of passes made over it so far, fractional; for the log.

        Called: for the metrics of a step; in the driver; once per step.
        """

    def next_batch(self, size: int) -> list[ExampleDraw]:
        """Draw ``size`` examples. The draws of one example are numbered from 0, and no two draws share a seed key.

        Called: when a step needs examples; in the driver; once per step, and again to refill it.
        """

    def observe(self, samples: Sequence[Sample]) -> None:
        """Receives the scored samples of a step before training, for example to adapt a curriculum.

        Called: when the samples of a step are scored; in the driver; once per step.
        """


class SampleFilter(Stateful, Protocol):
    """Excludes samples from training, or changes their rewards. Built as ``factory(options)``."""

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        """Sample id -> reason for exclusion; counted as ``samples/excluded/<reason>``.

        Called: when the samples of a step are scored; in the driver; once per step.

        Args:
            samples: scored samples of one step, in whole groups, without those already excluded.
        """

    def rewards(self, samples: Sequence[Sample]) -> Mapping[str, RewardResult]:
        """Sample id -> the reward that takes the place of the sample's; the others keep theirs. Called after
        ``excluded``, once in a step. Evaluations, and what chose the step's groups, had the reward as it was scored.

        Called: after ``excluded``; in the driver; once per step.

        Args:
            samples: those given to ``excluded``, without those that it excluded.
        """
        return {}


class Schedule(Protocol):
    """A number that depends only on the step. Built as ``factory(options)``; holds no state."""

    def value(self, step: int) -> float:
        """Of a step, from 1.

        Called: when a step needs the setting; in the driver, and for options in a worker of the policy; any number of
        times per step.
        """


@dataclass(slots=True, frozen=True)
class Decision:
    """A step policy's reaction to a step."""

    stop: str | None = None
    """Reason to end the run now, as a success: it saves, evaluates and exports as after its last step."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters to change from the next step on: ``max_tokens``, at most the configured value."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics added to the step's line."""


class StepPolicy(Stateful, Protocol):
    """Reacts to the metrics of each step. Built as ``factory(options)``."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        """Called once per step, when its metrics are complete. None means no reaction.

        Called: when a step's metrics are complete; in the driver; once per step.
        """
