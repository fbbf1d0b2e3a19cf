"""The producer of the modes ``one_step_off`` and ``async``: rollouts are made while the trainer updates."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from chatlearn_async.admissions import AdmissionLog, Replay
from chatlearn_async.interruption import InterruptibleCompletions
from chatlearn_async.options import AsyncOptions, DuringSync, OneStepOffOptions
from chatlearn_async.plan import abort_problem, at_sync, during_sync, is_repeatable, turns_together
from chatlearn_async.timeline import FILE, Timeline
from chatlearn_async.wave import Wave
from chatlearn_core.config.models import TrainConfig
from chatlearn_core.data import ExampleKind
from chatlearn_core.executor.component_factory import (
    RolloutModeContext,
    production_scheduler,
    serving_generators,
)
from chatlearn_core.executor.decisions import Decisions, next_draws
from chatlearn_core.executor.rollout_buffer import STALE, RolloutBuffer
from chatlearn_core.executor.rollout_producer import Production, RolloutProducer, make_requests
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.pending import Group, groups_of
from chatlearn_core.executor.rollouts.staleness import oldest_version
from chatlearn_core.executor.run_state import RunState
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, ExampleSampler
from chatlearn_core.types import Metric, Metrics, SamplingParams

_MOST_AGES = 16
"""Largest staleness that has a metric of its own; older tokens are counted with it."""


class AsyncRolloutProducer(RolloutProducer):
    """Keeps up to ``max_staleness`` steps' groups in flight while a step trains, and hands them over in the order in
    which they were drawn.

    Groups are drawn when a step asks for its own, at most (η + 1)·B less what is in flight, η = ``max_staleness`` and
    B = ``prompts_per_step``; never more than the remaining steps train on. A group drawn under version v is thus
    trained on under version v + η at the latest (capacity of arXiv 2505.24298, section 4.1, with the order of the
    draws): no sample is dropped because it is too old, and steps train on the samples, long and short, that ``sync``
    would have drawn for them.

    Args:
        source: answers calls on generators; weight syncs interrupt it.
        state: has the policy version.
        train: the section of the configuration.
        max_staleness: η.
        serving: the generators that serve the policy's weights.
        save_every: steps between checkpoints; 0: only the last.
        timeline: records when trainer and replicas worked; None: nothing does.
        clock: returns seconds.
    """

    def __init__(
        self,
        scheduler: FlowScheduler,
        algorithm: Algorithm,
        sampler: ExampleSampler,
        sampling: SamplingParams,
        seed: int,
        *,
        source: InterruptibleCompletions,
        state: RunState,
        train: TrainConfig,
        max_staleness: int,
        serving: frozenset[str],
        decisions: Decisions | None = None,
        rollouts: Rollouts | None = None,
        kind: ExampleKind | None = None,
        save_every: int = 0,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            scheduler, algorithm, sampler, sampling, seed, decisions=decisions, rollouts=rollouts, kind=kind
        )
        self.source = source
        self.state = state
        self.train = train
        self.max_staleness = max_staleness
        self.serving = serving
        self.save_every = save_every
        self.timeline = Timeline(None, clock) if timeline is None else timeline
        if rollouts is not None:
            rollouts.on_open = self.timeline.opened
        self._clock = clock
        self._waves: deque[Wave] = deque()
        """Waves in flight, first drawn first."""
        self._finished: deque[FinishedGroup] = deque()
        """Finished groups of a wave that a step took only in part."""
        self._step = 0
        """The step that asked for groups last."""
        self._is_restored = True
        """Whether ``pending`` has come from a checkpoint, or is empty at the start."""
        self._delivered_at = clock()
        self._drained_s = 0.0
        """Seconds since then that a weight sync waited for rollouts."""

    # The loop

    async def produce(self, step: int, missing: int) -> Production:
        """Draw what may be in flight, and wait for the next ``missing`` groups in the order of the draws.

        Raises: as ``RolloutProducer``; also what failed in a later wave.
        """
        is_first, self._step = step != self._step, step
        self._draw(step, self._num_wanted(step, missing, is_first))
        began = self._clock()
        timers = Timers()
        with timers.measure("wait_for_rollouts"):
            while len(self._finished) < missing:
                await self._finish_first(timers)
        self.timeline.waited(began)
        groups = [self._finished.popleft() for _ in range(missing)]
        metrics = self._shares(self._clock() - began)
        groups, stale = self._without_stale(groups)
        metrics |= stale | self._ages(groups) | {"rollout/in_flight": Metric(self._num_in_flight, reducer="sum")}
        if self.rollouts is not None:
            metrics |= self.rollouts.metrics()
        return Production(groups, metrics, timers)

    async def before_sync(self) -> None:
        """Let no completion be sampled by two versions unnoticed, and note what is in flight for a checkpoint."""
        self.timeline.updates_end()
        if self.source.how == "wait":
            began = self._clock()
            await self._wait(lambda: all(wave.is_done for wave in self._waves))
            self._drained_s += self._clock() - began
            self.timeline.waited(began)
        self.timeline.sync_begins(pauses=self.source.how == "pause")
        await self.source.interrupt(self._unfinished, saves=bool(self.save_every) and self._step % self.save_every == 0)
        if self.source.log is not None:  # with nothing awaited before the snapshot, so that the two agree
            self.source.log.synced(self._step, self.state.policy_version, self._unfinished())
        self.pending = await self._snapshot()

    async def updates_done(self) -> None:
        """Every replica serves the new weights: go on, after a start with the rollouts of the checkpoint."""
        if self._is_restored:
            self._is_restored = False
            self.timeline.restart()
            if self.source.log is not None:
                self.source.log.restart(self.state.step)
            self.source.step = self.state.step + 1
            size = self.train.prompts_per_step
            for start in range(0, len(self.pending), size):
                for group in self.pending[start : start + size]:
                    self.source.restore(group)
                self._begin(Wave([_unfilled(group) for group in self.pending[start : start + size]]))
        else:
            self.timeline.sync_ends(self._step)
            self.source.step = self._step + 1
        await self.source.resume()

    async def close(self) -> None:
        """Cancel everything in flight."""
        tasks = [wave.task for wave in self._waves if wave.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waves.clear()
        self._finished.clear()
        await self.source.close()
        self._is_restored, self._step = True, 0

    # Drawing

    @property
    def _num_in_flight(self) -> int:
        """Groups that were drawn and not handed over."""
        return sum(len(wave.groups) for wave in self._waves) + len(self._finished)

    def _num_wanted(self, step: int, missing: int, is_first: bool) -> int:
        """Groups to draw. When a step asks again, because its algorithm wants more, only what is not in flight yet."""
        least = missing - self._num_in_flight
        if not is_first:
            return max(0, least)
        per_step = self.train.prompts_per_step
        steps_ahead = min(self.max_staleness, max(0, self.train.steps - step))
        buffered = per_step - missing
        return max(0, least, (steps_ahead + 1) * per_step - buffered - self._num_in_flight)

    def _draw(self, step: int, count: int) -> None:
        """Draw groups and begin their rollouts, a wave for each step."""
        sampling = self.decisions.sampling_at(step, self.sampling)
        while count > 0:
            size = min(count, self.train.prompts_per_step)
            draws = next_draws(self.sampler, size)
            made = make_requests(draws, self.algorithm.group_size, sampling, self.seed, self.calls, self.kind)
            self._begin(Wave(groups_of(made)))
            count -= size

    def _begin(self, wave: Wave) -> None:
        wave.task = asyncio.ensure_future(self.scheduler.run(wave.open_requests, wave.timers, self.source))
        self._waves.append(wave)

    # Taking

    async def _finish_first(self, timers: Timers) -> None:
        """Wait for the wave that was drawn first, and move its groups to the finished ones."""
        wave = self._waves[0]
        await self._wait(lambda: wave.is_done)
        self._finished.extend(wave.finished())
        self._waves.popleft()
        self.source.forget(request.sample_id for request in wave.open_requests)
        timers.include(wave.timers)

    def _unfinished(self) -> list[str]:
        """Ids of the samples whose rollouts are unfinished; raises what failed in a wave."""
        found: list[str] = []
        for wave in self._waves:
            if wave.is_done:
                wave.finished()
            else:
                found += [request.sample_id for request in wave.open_requests if not self._is_sampled(request)]
        return found

    def _is_sampled(self, request: RolloutRequest) -> bool:
        """Whether nothing more is sampled for a request."""
        nodes = [node for node in self.scheduler.stage if node.kind in ("generator", "environment")]
        return request.calls_left == 0 or (request.sample is not None and len(nodes) == 1)

    async def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until ``is_over``; raise what fails in any wave meanwhile."""
        while True:
            for wave in self._waves:
                if wave.is_done:
                    wave.finished()
            if is_over():
                return
            running = [wave.task for wave in self._waves if wave.task is not None and not wave.is_done]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    def _without_stale(self, groups: Sequence[FinishedGroup]) -> tuple[list[FinishedGroup], Metrics]:
        """The groups; samples of those that are too old are excluded. Pacing leaves none."""
        kept: list[FinishedGroup] = []
        version, num_stale = self.state.policy_version, 0
        for group in groups:
            oldest = oldest_version(group.samples, self.serving)
            if oldest is not None and version - oldest > self.max_staleness:
                num_stale += 1
                group = group.copy()
                for sample in group.samples:
                    sample.exclusion = sample.exclusion or (
                        f"{STALE}: version {oldest} sampled it, the policy's is {version}"
                    )
            kept.append(group)
        return kept, {"rollout/dropped_stale": Metric(num_stale, len(groups))} if groups else {}

    # Metrics

    def _shares(self, waited_s: float) -> Metrics:
        """Idle fractions of updater and generators since the last groups were handed over."""
        now = self._clock()
        seconds, self._delivered_at = now - self._delivered_at, now
        waited_s, self._drained_s = waited_s + self._drained_s, 0.0
        busy_s = min(self.source.busy.take(), seconds)
        return {
            "perf/updater_idle": Metric(min(waited_s, seconds), seconds),
            "perf/generator_idle": Metric(seconds - busy_s, seconds),
        }

    def _ages(self, groups: Iterable[FinishedGroup]) -> Metrics:
        """``rollout/staleness/<versions>``: fraction of the sampled tokens of that age."""
        tokens = dict.fromkeys(range(min(self.max_staleness, _MOST_AGES) + 1), 0)
        for group in groups:
            for turn in (turn for sample in group.samples for turn in sample.turns if turn.generator in self.serving):
                for span in turn.version_spans:
                    age = min(self.state.policy_version - span.version, _MOST_AGES)
                    tokens[age] = tokens.get(age, 0) + span.stop - span.start
        total = sum(tokens.values())
        return {f"rollout/staleness/{age}": Metric(count, total) for age, count in tokens.items()} if total else {}

    # Checkpoints

    async def _snapshot(self) -> tuple[Group, ...]:
        """Everything in flight, with plain arrays, in the order of the draws: finished groups with their rewards, and
        the tokens of the others.
        """
        found: list[FinishedGroup | Group] = list(self._finished)
        for wave in self._waves:
            found += wave.finished() if wave.is_done else map(self._in_flight, wave.groups)
        finished = RolloutBuffer(self.max_staleness, self.serving)
        finished.admit(group for group in found if isinstance(group, FinishedGroup))
        plain = await finished.with_values(self.scheduler.runtime.data)
        values = {group.id: Group(list(group.requests)) for group in plain.groups}
        return tuple(values[group.id] if isinstance(group, FinishedGroup) else group for group in found)

    def _in_flight(self, group: Group) -> Group | FinishedGroup:
        """A group of a wave that is not done, but may be so itself."""
        if group.is_finished:
            return FinishedGroup(tuple(group.requests))
        unfilled = group.copy()
        unfilled.progress = [self.source.progress(request.sample_id) for request in group.requests]
        return unfilled


def _unfilled(group: Group) -> Group:
    """A group from a checkpoint, which stays unchanged."""
    if not group.is_finished:
        return group.copy()
    return Group(list(FinishedGroup(tuple(group.requests)).copy().requests))


def one_step_off(options: OneStepOffOptions, context: RolloutModeContext) -> AsyncRolloutProducer:
    """The producer of the mode ``one_step_off``."""
    return _producer(context, "wait")


def asynchronous(options: AsyncOptions, context: RolloutModeContext) -> AsyncRolloutProducer:
    """The producer of the mode ``async``.

    Raises:
        ConfigError: the record of ``replay`` cannot be read.
    """
    if context.max_staleness == 0:
        return _producer(context, "wait")
    assembly = context.parts.assembly
    replay = None if options.replay is None else Replay(Path(options.replay))
    together = turns_together(options, context.max_staleness, assembly.loaded.source)
    return _producer(context, during_sync(options, assembly.loaded, assembly.graph), replay, together)


def _producer(
    context: RolloutModeContext, how: DuringSync, replay: Replay | None = None, together: bool = True
) -> AsyncRolloutProducer:
    """A producer.

    Raises:
        ConfigError: the generator shares devices, so that nothing can be sampled during updates.
    """
    parts, assembly = context.parts, context.parts.assembly
    serving = serving_generators(assembly)
    if context.max_staleness and parts.colocation is not None:
        parts.colocation.sharing.check_kept(f"rollout.mode: {assembly.config.rollout.mode}", sorted(serving))
    source = InterruptibleCompletions(
        parts.rollouts,
        serving,
        how,
        at_sync=at_sync(how, assembly.loaded),
        log=AdmissionLog(assembly.plan.run_dir) if is_repeatable(how, assembly.loaded) else None,
        replay=replay,
        turns_together=together,
        resumable=abort_problem(assembly.loaded) is None,
    )
    return AsyncRolloutProducer(
        production_scheduler(parts),
        assembly.algorithm,
        context.sampler,
        assembly.sampling,
        assembly.config.seed,
        source=source,
        state=context.state,
        train=assembly.config.train,
        max_staleness=context.max_staleness,
        serving=serving,
        decisions=context.decisions,
        rollouts=parts.rollouts,
        kind=assembly.kind,
        save_every=assembly.config.checkpoint.every,
        timeline=Timeline(assembly.plan.run_dir / FILE),
    )
