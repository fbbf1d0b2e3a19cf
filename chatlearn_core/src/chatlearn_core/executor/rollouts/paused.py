"""Partial rollouts that stay in the engine: a step ends when enough prompts are complete, and the other completions
wait in the engine for the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from chatlearn_core.exceptions import BackendError, RoleLostError
from chatlearn_core.executor.rollouts.chunked import progressed
from chatlearn_core.executor.rollouts.in_flight import Generate, PromptsInFlight
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.protocols import DataStore, GeneratorFleet
from chatlearn_core.types import Completion, Metrics


class PausedRollouts(PromptsInFlight):
    """Completions that are paused in the engine while the trainer updates, and continue under the new weights.

    A step has ``in_flight_prompts`` prompts in flight: pending ones and new ones. It ends, and the engine is paused, as
    soon as ``prompts_per_step`` prompts are complete. Further prompts are trained on if they are complete by then, or
    if one of their completions is in its ``max_rounds``-th step and must end. Which prompts a step trains on depends on
    timing. A checkpoint holds the prompts in flight and their finished completions; unfinished ones start again.

    Args:
        generate: sends a request.
        fleet: returns the fleet to pause.
        prompts_per_step: number of complete prompts that end a step's generation.
        max_rounds: maximum number of steps of a completion, at least 1.
        in_flight_prompts: greater than ``prompts_per_step``.
        data: fetches values behind references in completions.
    """

    def __init__(
        self,
        generate: Generate,
        fleet: Callable[[], GeneratorFleet],
        *,
        prompts_per_step: int,
        max_rounds: int,
        in_flight_prompts: int,
        data: DataStore | None = None,
    ) -> None:
        super().__init__(generate, max_rounds=max_rounds, in_flight_prompts=in_flight_prompts, data=data)
        self.prompts_per_step = prompts_per_step
        self._fleet = fleet
        self._running: dict[str, asyncio.Task[Completion]] = {}
        """Sample id -> task of its request, from its first step to its last."""
        self._paused = False

    async def _sample(self, rollout_step: PartialRolloutStep) -> None:
        """Sample until enough groups are complete, then pause."""
        rollout_step.num_rounds = 1
        await self.weights_changed()  # a step that finishes rollouts twice pauses in between
        self._start(rollout_step)
        self._collect(rollout_step)
        while not self._enough(rollout_step):
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect(rollout_step)
        if self._running:
            self._paused = True
            await self._fleet().pause()

    async def finish(self, rollout_step: PartialRolloutStep) -> tuple[tuple[Group, ...], Metrics]:
        """See ``PartialRollouts``."""
        for group in rollout_step.unfinished:
            group.progress = [
                progress if progress.ended else replace(progress, rounds=progress.rounds + 1)
                for progress in group.progress
            ]
        return await self._pending(rollout_step, len(self._running))

    async def weights_changed(self) -> None:
        """Resume the paused completions."""
        if self._paused:
            self._paused = False
            await self._fleet().resume()

    async def close(self) -> None:
        """Cancel the requests in the engine."""
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    def _start(self, rollout_step: PartialRolloutStep) -> None:
        for group in rollout_step.groups:
            for request, progress in zip(group.requests, group.progress, strict=True):
                if not progress.ended and request.sample_id not in self._running:
                    assert request.generate_request is not None, "partial rollouts are of prompts"
                    self._running[request.sample_id] = asyncio.ensure_future(self._generate(request.generate_request))

    def _collect(self, rollout_step: PartialRolloutStep) -> None:
        """Take ended completions. Raises ReplicaLostError, and any other error that is not one request's failure."""
        for group in rollout_step.groups:
            for index, request in enumerate(group.requests):
                task = self._running.get(request.sample_id)
                if task is None or not task.done():
                    continue
                del self._running[request.sample_id]
                rounds = group.progress[index].rounds + 1
                assert request.generate_request is not None
                try:
                    completion = task.result()
                except RoleLostError:
                    raise
                except BackendError as error:
                    group.progress[index] = Progress(failure=error, rounds=rounds)
                else:
                    group.progress[index] = progressed(completion, request.generate_request, rounds, last=True)
            rollout_step.tell(group)

    def _enough(self, rollout_step: PartialRolloutStep) -> bool:
        unfinished = rollout_step.unfinished
        due = any(
            not progress.ended and progress.rounds + 1 >= self.max_rounds
            for group in unfinished
            for progress in group.progress
        )
        return not unfinished or (
            not due and sum(g.has_completion for g in rollout_step.complete) >= self.prompts_per_step
        )
