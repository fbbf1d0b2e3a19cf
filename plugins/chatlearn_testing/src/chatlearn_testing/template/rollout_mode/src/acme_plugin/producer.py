"""The producer of the mode ``acme``."""

from __future__ import annotations

import asyncio
from typing import Any

from chatlearn_core.config.models import TrainConfig
from chatlearn_core.executor.component_factory import RolloutModeContext, production_scheduler, serving_generators
from chatlearn_core.executor.decisions import next_draws
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import Production, RolloutProducer, make_requests
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest, finished_groups
from chatlearn_core.metrics import Timers
from chatlearn_core.types import Metric

from acme_plugin.options import AcmeOptions

Rollouts = tuple[list[FinishedGroup], Timers]
"""Finished groups, and how long each part of making them took."""


class AcmeProducer(RolloutProducer):
    """Makes the rollouts of the next step while a step trains, and hands groups over in the order of their draws.

    Args:
        *arguments: as ``RolloutProducer``.
        train: the section of the configuration.
        serving: the generators that serve the policy's weights.
        first_step: the first step whose successor's rollouts are made meanwhile; None: there is none.
        **named: as ``RolloutProducer``.
    """

    def __init__(
        self, *arguments: Any, train: TrainConfig, serving: frozenset[str], first_step: int | None, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._train = train
        self._serving = serving
        self._first_step = first_step
        self._step = 0
        """The step that asked for groups last."""
        self._ahead: asyncio.Task[Rollouts] | None = None
        self._made: list[FinishedGroup] = []
        """Groups that were made ahead, and that no step has taken yet."""
        self._is_fresh = True
        """Whether ``pending`` has come from a checkpoint, or is empty at the start."""

    async def produce(self, step: int, missing: int) -> Production:
        """See ``RolloutProducer``: takes what was made ahead, and draws what is still missing."""
        is_first, self._step = step != self._step, step
        timers = Timers()
        groups = await self._made_before(timers)
        metrics = {"rollout/made_ahead": Metric(len(groups), reducer="sum")}
        if len(groups) < missing:
            made, spent = await self._play(self._draw(step, missing - len(groups)))
            groups += made
            timers.include(spent)
        groups, self._made = groups[:missing], groups[missing:]
        if is_first and self._first_step is not None and self._first_step <= step < self._train.steps:
            requests = self._draw(step + 1, self._train.prompts_per_step - len(self._made))
            self._ahead = asyncio.ensure_future(self._play(requests))
        if self.rollouts is not None:
            metrics |= self.rollouts.metrics()
        return Production(groups, metrics, timers)

    async def before_sync(self) -> None:
        """Let no completion be sampled by two versions, and note for a checkpoint what no step has taken."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])
            self._ahead.result()
        self.pending = await self._snapshot()

    async def close(self) -> None:
        """Cancel what is in flight. A run that returns to its last checkpoint goes on with ``pending``."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        self._ahead, self._made, self._is_fresh, self._step = None, [], True, 0

    def _draw(self, step: int, count: int) -> list[RolloutRequest]:
        """Draw groups for a step."""
        sampling = self.decisions.sampling_at(step, self.sampling)
        draws = next_draws(self.sampler, count)
        return make_requests(draws, self.algorithm.group_size, sampling, self.seed, self.calls, self.kind)

    async def _play(self, requests: list[RolloutRequest]) -> Rollouts:
        timers = Timers()
        if requests:
            await self.scheduler.run(requests, timers)
        return finished_groups(requests), timers

    async def _made_before(self, timers: Timers) -> list[FinishedGroup]:
        """Take the groups that were made before this step asked for them, first drawn first."""
        if self._is_fresh:
            self._is_fresh = False
            self._made = [FinishedGroup(tuple(group.requests)).copy() for group in self.pending]
        groups, self._made = self._made, []
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            with timers.measure("wait_for_rollouts"):
                made, spent = await ahead
            groups = groups + made
            timers.include(spent)
        return groups

    async def _snapshot(self) -> tuple[Group, ...]:
        """Everything that no step has taken, with plain arrays instead of references to workers."""
        ahead = [] if self._ahead is None else self._ahead.result()[0]
        buffer = RolloutBuffer(1, self._serving)
        buffer.admit([*self._made, *ahead])
        plain = await buffer.with_values(self.scheduler.runtime.data)
        return tuple(Group(list(group.requests)) for group in plain.groups)


def acme(
    options: AcmeOptions,
    context: RolloutModeContext,
) -> AcmeProducer:
    """Make the producer of a run.

    Raises:
        ConfigError: the generators share devices with the trainer, so that nothing can be sampled meanwhile.
    """
    parts, assembly = context.parts, context.parts.assembly
    serving = serving_generators(assembly)
    if context.max_staleness and parts.colocation is not None:
        parts.colocation.sharing.check_kept("rollout.mode: acme", sorted(serving))
    return AcmeProducer(
        production_scheduler(parts),
        assembly.algorithm,
        context.sampler,
        assembly.sampling,
        assembly.config.seed,
        train=assembly.config.train,
        serving=serving,
        first_step=options.first_steps + 1 if context.max_staleness else None,
        decisions=context.decisions,
        rollouts=parts.rollouts,
        kind=assembly.kind,
    )
