"""What plugins may decide in a run: which examples are drawn, which samples are trained on, how settings change with
the steps, and what follows from a step's metrics. Chosen by name in the configuration, deterministic, with their state
in checkpoints. (Observers see the same and change nothing.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from chatlearn_core.types import ExampleDraw, Sample

if TYPE_CHECKING:
    from chatlearn_core.data import Dataset


class Stateful(Protocol):
    """Something whose state is in checkpoints. Subclass it for the default: no state."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that has changed since it was built, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be where ``state_dict`` was taken.

        Raises:
            CheckpointError: the state is of other data or settings.
        """


@dataclass(slots=True, frozen=True)
class SamplerContext:
    """What a sampler draws from."""

    datasets: Sequence[Dataset]
    """At least one, none empty."""
    seed: int
    """The run's: all chance must come from it."""
    shuffle: bool
    """``data.shuffle``"""


class ExampleSampler(Stateful, Protocol):
    """An endless stream of training examples. Built as ``factory(options, SamplerContext)``."""

    @property
    def epochs(self) -> Mapping[str, float]:
        """Dataset name -> passes made over it so far, in fractions; for the log."""

    def next_batch(self, size: int) -> list[ExampleDraw]:
        """Draw ``size`` examples. The draws of one example are numbered from 0, and no two draws share a seed key."""

    def observe(self, samples: Sequence[Sample]) -> None:
        """The samples of a step with their rewards, before any is trained on: what a curriculum goes by."""


class SampleFilter(Stateful, Protocol):
    """Says which samples are not trained on. Built as ``factory(options)``."""

    def excluded(self, samples: Sequence[Sample]) -> Mapping[str, str]:
        """Sample id -> why it is not trained on; counted as ``samples/excluded/<reason>``.

        Args:
            samples: of one step, scored, whole groups, without those that are excluded already.
        """


class Schedule(Protocol):
    """A number that depends on the step. Built as ``factory(options)``; holds no state."""

    def value(self, step: int) -> float:
        """Of a step, from 1."""


@dataclass(slots=True, frozen=True)
class Decision:
    """What follows from a step."""

    stop: str | None = None
    """Why the run ends here, well: it saves, evaluates and exports as after its last step."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters from the next step on: ``max_tokens``, up to the configured number."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to the step's line."""


class StepPolicy(Stateful, Protocol):
    """Decides what follows from a step. Built as ``factory(options)``."""

    def after_step(self, step: int, metrics: Mapping[str, float]) -> Decision | None:
        """Called once a step, when its metrics are complete. None: nothing follows."""
