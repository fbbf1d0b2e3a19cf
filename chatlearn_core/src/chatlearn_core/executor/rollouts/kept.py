"""Partial rollouts that stay in the engine: a step ends when enough prompts are complete, and the others wait there for
the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from chatlearn_core.exceptions import BackendError, RoleLostError
from chatlearn_core.executor.rollouts.in_flight import Generate, PromptsInFlight
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.executor.rollouts.rounds import progressed
from chatlearn_core.executor.rollouts.turn import RolloutTurn
from chatlearn_core.protocols import GeneratorFleet
from chatlearn_core.types import Completion, Metrics


class KeptRollouts(PromptsInFlight):
    """Completions that are paused in the engine while the trainer learns, and go on under the new weights.

    A step has ``in_flight_prompts`` prompts in flight: those that are pending, and new ones. It ends, and the engine is
    paused, as soon as ``prompts_per_step`` prompts are complete; more are trained if they are complete by then, or if a
    completion of theirs is in its ``max_rounds``-th step and has to end. Which prompts a step trains depends on timing.
    A checkpoint holds the prompts in flight and their finished completions; unfinished ones begin again.

    Args:
        generate: makes a request.
        fleet: gives the replicas that are paused.
        prompts_per_step: complete prompts that end a step's generation.
        max_rounds: steps of a completion, at least 1.
        in_flight_prompts: more than ``prompts_per_step``.
    """

    def __init__(
        self,
        generate: Generate,
        fleet: Callable[[], GeneratorFleet],
        *,
        prompts_per_step: int,
        max_rounds: int,
        in_flight_prompts: int,
    ) -> None:
        super().__init__(generate, max_rounds=max_rounds, in_flight_prompts=in_flight_prompts)
        self.prompts_per_step = prompts_per_step
        self._fleet = fleet
        self._running: dict[str, asyncio.Task[Completion]] = {}
        """Sample id -> its request, from its first step to its last."""
        self._paused = False

    async def _sample(self, turn: RolloutTurn) -> None:
        """Sample until enough groups are complete, then pause."""
        turn.num_rounds = 1
        self._start(turn)
        self._collect(turn)
        while not self._enough(turn):
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
            self._collect(turn)
        if self._running:
            self._paused = True
            await self._fleet().pause("keep")

    def finish(self, turn: RolloutTurn) -> tuple[tuple[Group, ...], Metrics]:
        """See ``PartialRollouts``."""
        for group in turn.unfinished:
            group.progress = [
                progress if progress.ended else replace(progress, rounds=progress.rounds + 1)
                for progress in group.progress
            ]
        return self._pending(turn, len(self._running))

    async def weights_changed(self) -> None:
        """Let what was kept go on."""
        if self._paused:
            self._paused = False
            await self._fleet().resume()

    async def close(self) -> None:
        """Give up what is in the engine."""
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    def _start(self, turn: RolloutTurn) -> None:
        for group in turn.groups:
            for slot, progress in zip(group.slots, group.progress, strict=True):
                if not progress.ended and slot.sample_id not in self._running:
                    assert slot.request is not None, "partial rollouts are of prompts"
                    self._running[slot.sample_id] = asyncio.ensure_future(self._generate(slot.request))

    def _collect(self, turn: RolloutTurn) -> None:
        """Take what has ended. Raises: ReplicaLostError, and whatever else is no failure of one request."""
        for group in turn.groups:
            for index, slot in enumerate(group.slots):
                task = self._running.get(slot.sample_id)
                if task is None or not task.done():
                    continue
                del self._running[slot.sample_id]
                rounds = group.progress[index].rounds + 1
                assert slot.request is not None
                try:
                    completion = task.result()
                except RoleLostError:
                    raise
                except BackendError as error:
                    group.progress[index] = Progress(failure=error, rounds=rounds)
                else:
                    group.progress[index] = progressed(completion, slot.request, rounds, last=True)
            turn.tell(group)

    def _enough(self, turn: RolloutTurn) -> bool:
        unfinished = turn.unfinished
        due = any(
            not progress.ended and progress.rounds + 1 >= self.max_rounds
            for group in unfinished
            for progress in group.progress
        )
        return not unfinished or (not due and sum(g.has_completion for g in turn.complete) >= self.prompts_per_step)
