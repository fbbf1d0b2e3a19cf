"""The producer of the mode ``acme``."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from chatlearn_core.executor.component_factory import RolloutModeContext, production_scheduler, serving_generators
from chatlearn_core.executor.decisions import next_draws
from chatlearn_core.executor.rollout_buffer import RolloutBuffer
from chatlearn_core.executor.rollout_producer import Production, RolloutProducer, make_requests
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest, finished_groups
from chatlearn_core.metrics import Timers
from chatlearn_core.types import Metric, Metrics

from acme_plugin.options import AcmeOptions


@dataclass(slots=True, eq=False)
class Wave:
    """Groups that are drawn together and go through the flow's production stage together."""

    num_groups: int
    requests: list[RolloutRequest]
    timers: Timers
    task: asyncio.Task[object]


class AcmeProducer(RolloutProducer):
    """Makes the rollouts of up to ``max_staleness`` further steps while a step trains.

    Steps train on the groups in the order in which they were drawn, as with ``sync``. A weight sync waits for all that
    was begun, so every completion is of one policy version, and a checkpoint holds finished groups alone.
    """

    def __init__(self, context: RolloutModeContext) -> None:
        assembly = context.parts.assembly
        super().__init__(
            production_scheduler(context.parts),
            assembly.algorithm,
            context.sampler,
            assembly.sampling,
            assembly.config.seed,
            decisions=context.decisions,
            rollouts=context.parts.rollouts,
            kind=assembly.kind,
        )
        self.train = assembly.config.train
        self.max_staleness = context.max_staleness
        self._waves: deque[Wave] = deque()
        self._finished: deque[FinishedGroup] = deque()
        """Groups that no step has taken yet, first drawn first; those of the waves follow them."""
        self._is_restored = True
        """Whether ``pending`` comes from a checkpoint, or is empty at the start."""

    async def produce(self, step: int, missing: int) -> Production:
        """Begin what may be made ahead, and hand over the groups that were drawn first."""
        self._begin(step, self._num_wanted(step, missing))
        timers = Timers()
        with timers.measure("wait_for_rollouts"):
            while len(self._finished) < missing:
                await self._finish_first(timers)
        groups = [self._finished.popleft() for _ in range(missing)]
        metrics: Metrics = {"rollout/in_flight": Metric(self._num_in_flight, reducer="sum")}
        if self.rollouts is not None:
            metrics |= self.rollouts.metrics()
        return Production(groups, metrics, timers)

    async def before_sync(self) -> None:
        """Wait for all that was begun, and keep it for a checkpoint."""
        while self._waves:
            await self._finish_first(Timers())
        finished = RolloutBuffer(self.max_staleness)
        finished.admit(self._finished)
        plain = await finished.with_values(self.scheduler.runtime.data)
        self.pending = tuple(Group(list(group.requests)) for group in plain.groups)

    async def updates_done(self) -> None:
        """After a start, go on with the groups of the checkpoint."""
        if self._is_restored:
            self._is_restored = False
            self._finished.extend(FinishedGroup(tuple(group.requests)).copy() for group in self.pending)

    async def close(self) -> None:
        """Cancel everything that was begun."""
        tasks = [wave.task for wave in self._waves]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waves.clear()
        self._finished.clear()
        self._is_restored = True

    @property
    def _num_in_flight(self) -> int:
        """Groups that were drawn and not handed over."""
        return len(self._finished) + sum(wave.num_groups for wave in self._waves)

    def _num_wanted(self, step: int, missing: int) -> int:
        """Groups to draw: what is missing and ``max_staleness`` steps ahead, but none that no step would train on."""
        steps_ahead = min(self.max_staleness, self.train.steps - step)
        return missing + steps_ahead * self.train.prompts_per_step - self._num_in_flight

    def _begin(self, step: int, count: int) -> None:
        """Draw groups and begin their rollouts, a wave for each step."""
        sampling = self.decisions.sampling_at(step, self.sampling)
        while count > 0:
            size = min(count, self.train.prompts_per_step)
            draws = next_draws(self.sampler, size)
            requests = make_requests(draws, self.algorithm.group_size, sampling, self.seed, self.calls, self.kind)
            timers = Timers()
            task = asyncio.create_task(self.scheduler.run(requests, timers))
            self._waves.append(Wave(size, requests, timers, task))
            count -= size

    async def _finish_first(self, timers: Timers) -> None:
        """Wait for the wave that was drawn first; raises what failed in it."""
        wave = self._waves[0]
        await asyncio.wait([wave.task])
        wave.task.result()
        self._finished.extend(finished_groups(wave.requests))
        self._waves.popleft()
        timers.include(wave.timers)


def make_producer(options: AcmeOptions, context: RolloutModeContext) -> RolloutProducer:
    """The producer of a run.

    Raises:
        ConfigError: a generator shares devices with the trainer, so that nothing can be sampled while a step trains.
    """
    parts = context.parts
    if context.max_staleness and parts.colocation is not None:
        serving = sorted(serving_generators(parts.assembly))
        parts.colocation.sharing.check_kept("rollout.mode: acme", serving)
    return AcmeProducer(context)
