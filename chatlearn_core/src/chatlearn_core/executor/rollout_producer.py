"""The producer of rollouts: it draws examples, runs the flow's production stage and hands over finished groups."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chatlearn_core.data import ExampleKind, Prompts
from chatlearn_core.executor.decisions import Decisions, next_draws
from chatlearn_core.executor.flow_calls import sampled_as
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial import PartialRollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.scheduler import FlowScheduler
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest, finished_groups
from chatlearn_core.flow import Node
from chatlearn_core.metrics import Timers
from chatlearn_core.protocols import Algorithm, ExampleSampler
from chatlearn_core.types import ExampleDraw, GenerateRequest, Metrics, SamplingParams
from chatlearn_core.types.keyed_seed import keyed_seed


@dataclass(slots=True)
class Production:
    """The result of one run of the production stage."""

    groups: list[FinishedGroup]
    metrics: Metrics
    timers: Timers
    """Timers of its own, because updates may run concurrently."""


class RolloutProducer:
    """Draws examples and runs the flow's production stage over them (``stages``): generation, rewards.

    A rollout mode's factory returns this class or one that extends it. All methods run on the driver's event loop, on
    which generators, rewards and other requests work, too: none blocks. The run calls one at a time, in this order:
    ``close`` and ``updates_done`` at the start and whenever it goes back to a checkpoint; in each step ``produce``,
    then ``before_sync``, then ``updates_done``; ``close`` at the end, whatever ended the run. Updates are between
    ``produce`` and ``before_sync``, weight syncs between ``before_sync`` and ``updates_done``. A producer may make
    rollouts in tasks of its own all the while: it ends them in ``close``, and raises what fails in one from the next of
    the other methods.

    Groups are handed over in the order of their draws, each once. A step trains on tokens of weights that are at most
    ``RolloutModeContext.max_staleness`` policy versions older than the newest.

    Args:
        scheduler: runs that stage.
        algorithm: sets the number of completions per prompt.
        sampler: draws the examples.
        sampling: sampling parameters; the seed is replaced for every sample.
        seed: the run's seed.
        decisions: adapt the sampling parameters of a step.
        rollouts: the generators' rollout managers, for their metrics.
        partial: makes rollouts that may last longer than a step.
        kind: kind of the examples; prompts by default.
    """

    def __init__(
        self,
        scheduler: FlowScheduler,
        algorithm: Algorithm,
        sampler: ExampleSampler,
        sampling: SamplingParams,
        seed: int,
        *,
        decisions: Decisions | None = None,
        rollouts: Rollouts | None = None,
        partial: PartialRollouts | None = None,
        kind: ExampleKind | None = None,
    ) -> None:
        self.kind = kind
        self.decisions = decisions or Decisions()
        self.scheduler = scheduler
        self.algorithm = algorithm
        self.sampler = sampler
        self.sampling = sampling
        self.calls = scheduler.graph.calls("generator.generate")
        self.seed = seed
        self.rollouts = rollouts
        self.partial = partial
        self.pending: tuple[Group, ...] = ()
        """Groups that were drawn and not handed over, in the order of their draws: unfinished ones with their progress,
        finished ones with their samples, all with plain arrays. Each checkpoint holds them. Set by the producer, at the
        latest in ``before_sync``, and by the run, after ``close``, to those of the checkpoint that it goes back to.
        Replaced as a whole, never modified: a checkpoint may be written later."""

    def requests_of(self, draw: ExampleDraw) -> list[RolloutRequest]:
        """The requests for the samples of one draw.

        Called: when a run goes back to a checkpoint; in the driver; once per group that the checkpoint holds.
        """
        return make_requests([draw], self.algorithm.group_size, self.sampling, self.seed, self.calls, self.kind)

    async def produce(self, step: int, missing: int) -> Production:
        """Draw examples and finish their rollouts as well as pending ones.

        Called: at the beginning of a step, and again while its algorithm wants more groups; in the driver; once or
        more per step.

        Args:
            step: the step that schedules sample for.
            missing: number of groups needed. Partial rollouts instead draw enough to keep their number of prompts in
                flight, and finish at least one group.

        Returns:
            at least ``missing`` groups, which the step trains on first; further ones wait in the buffer.

        Raises:
            ReplicaLostError: a generator died more often than its restart limit allows.
            BackendError: a trainer role failed, or every generation failed.
        """
        draws = next_draws(self.sampler, missing if self.partial is None else self.partial.num_prompts(self.pending))
        sampling = self.decisions.sampling_at(step, self.sampling)
        requests = make_requests(draws, self.algorithm.group_size, sampling, self.seed, self.calls, self.kind)
        timers = Timers()
        metrics: Metrics = {}
        if self.partial is None:
            await self.scheduler.run(requests, timers)
        else:
            rollout_step = self.partial.begin(self.pending, requests)
            requests = rollout_step.requests
            playing = asyncio.create_task(self.partial.play(rollout_step))
            try:
                await self.scheduler.run(requests, timers, rollout_step)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)  # the scheduler has received its errors
            self.pending, metrics = await self.partial.finish(rollout_step)
        if self.rollouts is not None:
            metrics |= self.rollouts.metrics()
        return Production(finished_groups(requests), metrics, timers)

    async def before_sync(self) -> None:
        """A step's updates are done; the generators are about to load the new weights. Nothing is sampled here.

        Called: when the updates of a step are done, before their weight sync; in the driver; once per step.

        Raises:
            ChatLearnError: what failed in a rollout in flight.
        """

    async def updates_done(self) -> None:
        """A step's updates are done and every generator serves the new weights: continue paused rollouts.

        After ``close`` it is the first call: go on with ``pending``.

        Called: when the weights are synced, at the start, after each step and after a return to a checkpoint; in the
        driver; once each time.
        """
        if self.partial is not None:
            await self.partial.weights_changed()

    async def close(self) -> None:
        """Cancel rollouts that continue between steps, and wait until they have ended; what failed in them is of no
        interest any more. The producer can be used again: ``pending`` and ``updates_done`` begin anew.

        Called: at the start, before a return to a checkpoint and at the end of a run; in the driver; two times or more.
        """
        if self.partial is not None:
            await self.partial.close()


def make_requests(
    draws: Sequence[ExampleDraw],
    group_size: int,
    sampling: SamplingParams,
    seed: int,
    calls: Sequence[Node] = (),
    kind: ExampleKind | None = None,
) -> list[RolloutRequest]:
    """The requests of each draw: its own samples if it has them, otherwise one request per sample, ordered by group and
    within a group by call.

    A generated sample's random numbers depend only on the seed, its draw's ``seed_key`` and its index; for the second
    and further generator calls of a flow also on the number of the call.

    Args:
        calls: the flow's generator calls that take its prompts; without any, one call with default arguments is
            assumed.
        kind: kind of the examples; prompts by default.
    """
    kind = kind or Prompts()
    requests: list[RolloutRequest] = []
    for draw in draws:
        given = kind.samples(draw)
        requests.extend(RolloutRequest(sample.id, draw, None, sample) for sample in given)
        prompt, group_id = draw.example.prompt, draw.group_id
        if given:
            continue
        for number, call in enumerate(calls or (None,)):
            arguments: Mapping[str, Any] = call.arguments if call is not None else {}
            key, label = ((), "") if number == 0 else ((number,), f"{_label(call, number)}.")
            for index in range(arguments.get("n", group_size)):
                sample_id = f"{group_id}#{label}{index}"
                own_seed = keyed_seed(seed, "sample", draw.sample_key(index), *key)
                own = replace(sampled_as(arguments, sampling), seed=own_seed)
                request = GenerateRequest(sample_id, prompt.token_ids, own, group_id, media=prompt.media)
                maker = None if call is None else call.index
                requests.append(RolloutRequest(sample_id, draw, request, sampling=sampling, maker=maker))
    return requests


def _label(call: Node | None, number: int) -> str:
    """Suffix that distinguishes the samples of a further call from the first one's."""
    assert call is not None, "a flow without calls has no second one"
    return call.given_name or f"{call.role}_{number + 1}"
