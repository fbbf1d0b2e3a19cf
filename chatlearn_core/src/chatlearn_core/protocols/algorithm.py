"""An algorithm: a flow over roles, advantages, and a schedule of updates of the trained roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel

from chatlearn_core.exceptions import PluginError
from chatlearn_core.protocols.aggregation import Aggregation, SelectAggregation
from chatlearn_core.protocols.decisions import Schedule
from chatlearn_core.protocols.loss import Loss
from chatlearn_core.types import Derived, LogprobBasis, Metrics, Sample, TrainBatch

OptionsT = TypeVar("OptionsT", bound=BaseModel)
Split = Literal["group", "batch"]


def no_aggregation(name: str, options: Mapping[str, Any]) -> Aggregation:
    """Default of ``AlgorithmContext.aggregation``, for contexts made without plugins."""
    raise PluginError(f"there is no aggregation {name!r}: this context was made without plugins")


@dataclass(slots=True, frozen=True)
class AlgorithmContext:
    """Facts about the run that an algorithm may use."""

    basis: LogprobBasis
    """Basis of the distribution that training rollouts are sampled from."""
    max_completion_tokens: int
    roles: Mapping[str, str]
    """Configured role name -> kind."""
    generator_basis: LogprobBasis | None = None
    """Basis of the logprobs that the generator returns, if it differs from ``basis``: they are then in ``token_data``
    as ``generator_raw_logprobs``, and there are no ``generator_logprobs``."""
    generator: str = "the generator"
    """Plugin and role that return these logprobs, for messages."""
    aggregation: SelectAggregation = no_aggregation
    """Selects an aggregation that plugins registered (``chatlearn_aggregations``) by name."""
    prompts_per_step: int = 1
    """Number of examples that a step draws (``train.prompts_per_step``)."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """Option name -> its schedule over the steps (``schedules`` of the configuration)."""

    def options_at(self, options: OptionsT, step: int) -> OptionsT:
        """The algorithm's options with schedules applied for ``step``."""
        if not self.schedules:
            return options
        return options.model_copy(update={name: schedule.value(step) for name, schedule in self.schedules.items()})


@dataclass(slots=True, frozen=True)
class RoleUpdate:
    """Updates of one role in one step.

    Example:
        A critic that makes four passes over a step's samples before the policy makes one:
        [RoleUpdate("critic", ValueLoss(), epochs=4), RoleUpdate("policy", PolicyLoss(), epochs=1)]
    """

    role: str
    loss: Loss
    epochs: int | None = None
    """Passes over the step's samples; None means ``train.epochs``."""
    mini_batches: int | None = None
    """Optimizer steps per pass; None means ``train.mini_batches``."""


class Algorithm(Protocol):
    """Built as ``factory(options, context)`` with an ``AlgorithmContext``. Subclass this protocol for its defaults.

    All methods are pure except ``after_step``, which may change the state that ``state_dict`` returns.
    """

    input: str = "prompts"
    """The kind of examples that the algorithm takes: ``prompts``, ``demonstrations``, ``preferences``, or a kind that a
    plugin registers (``chatlearn_example_kinds``)."""
    group_size: int = 1
    """Number of completions sampled per prompt."""
    policy: str | None = None
    """The policy role: its weights are synced to the generators and exported at the end, its logprobs are compared
    with the generators', and its metrics are named ``policy/...``. None means the only language model that is
    trained."""
    advantage_split: Split = "group"
    """The part of a step's samples that ``advantages`` needs in one call: whole groups, which are split over the
    policy's data-parallel ranks, or all samples."""
    scheduled: frozenset[str] = frozenset()
    """Options that ``schedules`` may change: those that ``updates`` and ``advantages`` read through
    ``AlgorithmContext.options_at``."""
    evaluation_input: str | None = None
    """The kind of examples that ``evaluation`` takes; with None, evaluations sample and score prompts and never call
    ``evaluation``."""

    def flow(self, examples: Any, m: Any) -> Any:
        """The data flow of a step: an ordinary function over roles, traced once. Options may change its shape.

        Called: when a run is assembled; in the driver; once.
        """
        raise NotImplementedError

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Compute the data that the losses read, such as ``token_data["advantages"]``, from the flow's results.

        Called once per step, before any update, on the samples that are not excluded, in a worker of the policy, where
        the arrays are plain. The result must depend only on the arguments and the algorithm's options and state.

        Called: before a step's updates; in a worker of the policy; once per step and part of the batch.

        Args:
            batch: ``sequence_data["reward"]`` holds [S] float64 rewards if the flow has a reward,
                ``sequence_data["reward/<name>"]`` [S] float64 a component that all of the rewards have, and
                ``token_data["token_rewards"]`` [T] float32 per-token rewards if a reward gives them.
            step: counts from 1.
        """
        return Derived()

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """The updates of a step, in order. Also called before the run for every step, to plan it.

        Called: before the run, to plan it, and in each step; in the driver; once per step each.
        """
        raise NotImplementedError

    def wanted(self, samples: Sequence[Sample]) -> int:
        """Number of further examples to draw before the step can train, given its finished samples so far.

        Called: when the samples of a step are finished; in the driver; once or more per step, until it returns 0.
        """
        return 0

    def evaluation(self, examples: Any, m: Any) -> Any:
        """The data flow of an evaluation on held-out examples of kind ``evaluation_input``.

        Called: when a run is assembled, if ``evaluation_input`` is set; in the driver; once.
        """
        raise NotImplementedError

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        """Metrics of held-out samples, computed in the worker that has their arrays; logged as ``eval/<name>``.

        Called: in an evaluation by the algorithm's own flow; in a worker of the policy; once per evaluation and part
        of the batch.
        """
        return {}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when a step is complete, with its metrics; may adapt coefficients.

        Called: when a step is complete; in the driver; once per step.
        """

    def state_dict(self) -> dict[str, Any]:
        """State changed by ``after_step``, as JSON values, for checkpoints.

        Called: for each checkpoint; in the driver; once per checkpoint.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned.

        Called: when a run resumes or returns to its last checkpoint; in the driver; once each time.
        """
