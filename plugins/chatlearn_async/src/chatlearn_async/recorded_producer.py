"""The mode ``recorded``: steps train on rollouts from a directory, in the order in which they were recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_async.options import RecordedOptions
from chatlearn_async.recorded import (
    KEY,
    SAMPLES,
    check_amount,
    check_examples,
    check_facts,
    generates,
    steps_in,
)
from chatlearn_core.config.load import LoadedConfig
from chatlearn_core.exceptions import CheckpointError, ConfigError
from chatlearn_core.executor.checkpoint import Checkpoint, read_checkpoint
from chatlearn_core.executor.component_factory import RolloutModeContext, production_scheduler
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import Production, RolloutProducer
from chatlearn_core.executor.rollouts.saved import load_rollouts
from chatlearn_core.executor.step_samples import FinishedGroup
from chatlearn_core.flow import Graph
from chatlearn_core.metrics import Timers
from chatlearn_core.types import ExampleDraw, Sample


class RecordedProducer(RolloutProducer):
    """Hands over recorded groups, first recorded first, and samples nothing.

    A run that resumes goes on after the groups of its completed steps, whose number of samples the run's totals have.

    Args:
        options: name the directory.

    Raises:
        ConfigError: the rollouts belong to another tokenizer, model, flow or data.
        CheckpointError: the directory is damaged.
    """

    def __init__(self, options: RecordedOptions, context: RolloutModeContext) -> None:
        assembly = context.parts.assembly
        super().__init__(
            production_scheduler(context.parts),
            assembly.algorithm,
            NoSampler(),
            assembly.sampling,
            assembly.config.seed,
            decisions=context.decisions,
            kind=assembly.kind,
        )
        self.directory = options.directory
        self.source = assembly.loaded.source
        self.examples = assembly.train_set
        self.state = context.state
        self._all = steps_in(options.directory, self.source)
        check_facts(assembly, self._all[0])  # a recording does not go on with other settings
        check_examples(assembly, self._all)
        self._steps: deque[Checkpoint] = deque()
        """Steps that are not read yet."""
        self._groups: deque[FinishedGroup] | None = None
        """Groups that were read and not handed over; None: the place to go on from is not found yet."""

    async def produce(self, step: int, missing: int) -> Production:
        """The next ``missing`` groups.

        Raises:
            ConfigError: there are no more; names the directory.
            CheckpointError: a file is damaged, or the prompts have other tokens now.
        """
        if self._groups is None:
            self._groups = self._after(round(self.state.totals["samples/admitted"]))
        while len(self._groups) < missing:
            if not self._steps:
                raise ConfigError(
                    f"{self.source}: step {step} needs {missing} more groups of rollouts, but {KEY}, {self.directory}, "
                    f"has {len(self._groups)} left: the algorithm replaced groups. Lower train.steps, or record more "
                    "with chatlearn run --rollouts-only and a larger train.steps"
                )
            self._groups += self._read(self._steps.popleft())
        return Production([self._groups.popleft() for _ in range(missing)], {}, Timers())

    async def close(self) -> None:
        """Go on from the run's completed steps, which may be fewer now."""
        self._groups = None

    def _after(self, num_samples: int) -> deque[FinishedGroup]:
        """The groups of the first step that was not trained on completely, without those that were."""
        self._steps = deque(self._all)
        while self._steps and self._steps[0].state[SAMPLES] <= num_samples:
            num_samples -= self._steps.popleft().state[SAMPLES]
        groups: deque[FinishedGroup] = deque()
        if num_samples and self._steps:
            groups += self._read(self._steps.popleft())
            while num_samples > 0:
                num_samples -= len(groups.popleft().requests)
        return groups

    def _read(self, step: Checkpoint) -> Sequence[FinishedGroup]:
        read_checkpoint(step.path)  # verifies checksums
        saved = load_rollouts(step.path, self.examples, self.requests_of)
        buffer = RolloutBuffer(0)
        buffer.load_state_dict(saved.buffer, saved.requests_of)
        return buffer.groups


class NoSampler:
    """An ``ExampleSampler`` of a run whose examples are drawn already."""

    epochs: Mapping[str, float] = {}

    def next_batch(self, size: int) -> list[ExampleDraw]:
        """Never called."""
        raise AssertionError("recorded rollouts are of examples that were drawn")

    def observe(self, samples: Sequence[Sample]) -> None:
        """Nothing adapts."""

    def state_dict(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def plan(options: RecordedOptions, loaded: LoadedConfig, graph: Graph) -> list[str]:
    """Lines of the plan.

    Raises:
        ConfigError: the flow generates nothing, or the directory has no or too few rollouts.
    """
    if not generates(graph):
        raise ConfigError(
            f"{loaded.source}: rollout.mode is 'recorded', but the flow of algorithm {loaded.config.algorithm.name!r} "
            "generates nothing. Set rollout.mode: sync"
        )
    try:
        steps = steps_in(options.directory, loaded.source)
    except CheckpointError as error:
        raise ConfigError(f"{loaded.source}: {KEY} is {options.directory}: {error}") from error
    check_amount(loaded, steps)
    return [
        f"recorded: trains on the rollouts of {len(steps)} steps in {options.directory}, and samples none",
        "their tokens become older with each step: off-policy, unless the algorithm corrects for it",
        "generators, environments and rewards start only if an evaluation or an update calls them",
    ]


def recorded(options: RecordedOptions, context: RolloutModeContext) -> RecordedProducer:
    """The producer of the mode ``recorded``."""
    return RecordedProducer(options, context)
