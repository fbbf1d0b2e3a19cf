"""An algorithm: a flow over roles, advantages, and a schedule of updates of the roles that learn."""

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
    """For contexts that are made without plugins."""
    raise PluginError(f"there is no aggregation {name!r}: this context was made without plugins")


@dataclass(slots=True, frozen=True)
class AlgorithmContext:
    """What an algorithm may know about the run it is part of."""

    basis: LogprobBasis
    """Basis of the distribution that training rollouts are sampled from."""
    max_completion_tokens: int
    roles: Mapping[str, str]
    """Configured role name -> kind."""
    generator_basis: LogprobBasis | None = None
    """Basis of the logprobs that the generator returns for them, where it is another: they are then in ``token_data``
    as ``generator_raw_logprobs``, and there are no ``generator_logprobs``."""
    generator: str = "the generator"
    """Whose logprobs these are, for messages: plugin and role."""
    aggregation: SelectAggregation = no_aggregation
    """Aggregations by name, as plugins register them (``chatlearn_aggregations``)."""
    prompts_per_step: int = 1
    """Examples that a step draws (``train.prompts_per_step``)."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """Option -> how it changes with the steps (``schedules`` of the configuration)."""

    def options_at(self, options: OptionsT, step: int) -> OptionsT:
        """The algorithm's options as they are in a step."""
        if not self.schedules:
            return options
        return options.model_copy(update={name: schedule.value(step) for name, schedule in self.schedules.items()})


@dataclass(slots=True, frozen=True)
class RoleUpdate:
    """Updates of one role in one step.

    Example:
        A critic that passes four times over a step's samples before the policy passes once:
        [RoleUpdate("critic", ValueLoss(), epochs=4), RoleUpdate("policy", PolicyLoss(), epochs=1)]
    """

    role: str
    loss: Loss
    epochs: int | None = None
    """Passes over the step's samples; None: ``train.epochs``."""
    mini_batches: int | None = None
    """Optimizer steps a pass; None: ``train.mini_batches``."""


class Algorithm(Protocol):
    """Built as ``factory(options, context)`` with an ``AlgorithmContext``. Subclass it: what an algorithm does not need
    has a default here.

    Its methods are pure but for ``after_step``, which may move the state that ``state_dict`` returns.
    """

    input: str = "prompts"
    """The kind of examples that it takes: ``prompts``, ``demonstrations``, ``preferences``, or what a plugin registers
    (``chatlearn_example_kinds``)."""
    group_size: int = 1
    """Completions sampled for one prompt."""
    policy: str | None = None
    """The role that is the policy: its weights go to the generators, are exported at the end and are compared with
    what was sampled, and its metrics are named ``policy/...``. None: the only language model that learns."""
    advantage_split: Split = "group"
    """Which part of a step's samples ``advantages`` needs at a time: whole groups, or all of them. Groups are divided
    over the policy's data-parallel ranks."""
    scheduled: frozenset[str] = frozenset()
    """Options that ``schedules`` may change: those that ``updates`` and ``advantages`` read by
    ``AlgorithmContext.options_at``."""
    evaluation_input: str | None = None
    """The kind of example that ``evaluation`` takes; None: prompts are sampled and scored, and ``evaluation`` is not
    called."""

    def flow(self, examples: Any, m: Any) -> Any:
        """The data flow of a step: an ordinary function over roles, traced once. The options may change its shape."""
        raise NotImplementedError

    def advantages(self, batch: TrainBatch, step: int) -> Derived:
        """Turn what the flow computed into what the losses read, such as ``token_data["advantages"]``.

        Called once a step on the samples that are not excluded, before any update, in a worker of the policy: the
        arrays are there. Must not depend on anything but its arguments and the algorithm's options and state.

        Args:
            batch: ``sequence_data["reward"]`` holds [S] float64 rewards if the flow has any,
                ``sequence_data["reward/<name>"]`` [S] float64 a component that all of them have, and
                ``token_data["token_rewards"]`` [T] float32 those of single tokens if a reward gives them.
            step: from 1.
        """
        return Derived()

    def updates(self, step: int) -> Sequence[RoleUpdate]:
        """The updates of a step, in their order. Also called before the run, for every step, to plan it."""
        raise NotImplementedError

    def wanted(self, samples: Sequence[Sample]) -> int:
        """How many more examples must be drawn before the step can be trained, given its finished samples so far."""
        return 0

    def evaluation(self, examples: Any, m: Any) -> Any:
        """The data flow of an evaluation on held-out examples of kind ``evaluation_input``."""
        raise NotImplementedError

    def evaluation_metrics(self, batch: TrainBatch) -> Metrics:
        """Metrics of held-out samples, computed where their arrays are; logged as ``eval/<name>``."""
        return {}

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is complete, with these metrics: adapt coefficients."""

    def state_dict(self) -> dict[str, Any]:
        """What ``after_step`` has changed, as JSON values; checkpoints hold it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
