"""Partial rollouts in rounds: a completion grows by a bounded number of tokens per step and is resumed in the next.

Nothing here depends on timing: the tokens of a round depend only on the pending rollouts and the drawn prompts. A
killed run therefore continues bit-identically from the pending rollouts of its checkpoint.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from chatlearn_core.exceptions import BackendError, RoleLostError
from chatlearn_core.executor.rollouts.in_flight import Generate, PromptsInFlight
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep
from chatlearn_core.executor.rollouts.pending import Group, Progress
from chatlearn_core.protocols import DataStore
from chatlearn_core.types import Completion, GenerateRequest, Metrics


class ChunkedRollouts(PromptsInFlight):
    """Completions that continue over several steps, each time under the newest weights.

    A step begins with ``in_flight_prompts`` prompts: the pending ones, and new ones replacing those that were trained
    on. Every unfinished completion may grow by ``round_tokens``; in its ``max_rounds``-th round it has no such bound
    and ends. The step trains on every prompt whose completions have all ended, at least one: if there is none, another
    round follows in the same step.

    Args:
        generate: sends a request.
        round_tokens: maximum number of tokens that a completion grows by in a round.
        max_rounds: maximum number of rounds of a completion, at least 1.
        in_flight_prompts: number of prompts that a step begins with.
        data: fetches values behind references in completions.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        round_tokens: int,
        max_rounds: int,
        in_flight_prompts: int,
        data: DataStore | None = None,
    ) -> None:
        super().__init__(generate, max_rounds=max_rounds, in_flight_prompts=in_flight_prompts, data=data)
        self.round_tokens = round_tokens

    async def _sample(self, rollout_step: PartialRolloutStep) -> None:
        """Make rounds until at least one group is complete and has a completion."""
        while rollout_step.unfinished and not any(group.has_completion for group in rollout_step.complete):
            await self._round(rollout_step)

    async def finish(self, rollout_step: PartialRolloutStep) -> tuple[tuple[Group, ...], Metrics]:
        """See ``PartialRollouts``."""
        carried = sum(not progress.ended for group in rollout_step.unfinished for progress in group.progress)
        return await self._pending(rollout_step, carried)

    async def close(self) -> None:
        """Nothing to close: nothing runs between steps."""

    async def weights_changed(self) -> None:
        """Nothing to do: no request waits for new weights."""

    async def _round(self, rollout_step: PartialRolloutStep) -> None:
        rollout_step.num_rounds += 1
        async with asyncio.TaskGroup() as tasks:
            for group in rollout_step.groups:
                for index, progress in enumerate(group.progress):
                    if not progress.ended:
                        tasks.create_task(self._advance(rollout_step, group, index))
        await self._keep(rollout_step)

    async def _keep(self, rollout_step: PartialRolloutStep) -> None:
        """Fetch the values of completions that will be resumed, so that they survive the loss of their node."""
        places = [
            (group, index, progress.completion)
            for group in rollout_step.unfinished
            for index, progress in enumerate(group.progress)
            if progress.completion is not None and not progress.ended
        ]
        kept = await self.data.aget_completions([completion for _, _, completion in places])
        for (group, index, _), completion in zip(places, kept, strict=True):
            group.progress[index] = replace(group.progress[index], completion=completion)

    async def _advance(self, rollout_step: PartialRolloutStep, group: Group, index: int) -> None:
        progress, request = group.progress[index], group.requests[index].generate_request
        assert request is not None, "partial rollouts are of prompts"
        rounds = progress.rounds + 1
        whole = request.sampling.max_tokens
        limit = whole if rounds >= self.max_rounds else min(whole, progress.num_tokens + self.round_tokens)
        part = replace(request, sampling=replace(request.sampling, max_tokens=limit), resume_from=progress.completion)
        try:
            completion = await self._generate(part)
        except RoleLostError:
            raise
        except BackendError as error:
            group.progress[index] = Progress(failure=error, rounds=rounds)
        else:
            group.progress[index] = progressed(completion, request, rounds, last=rounds >= self.max_rounds)
        rollout_step.tell(group)


def progressed(completion: Completion, request: GenerateRequest, rounds: int, *, last: bool) -> Progress:
    """A sample's progress after a round, with its completion measured against the whole ``request``.

    A completion that was cut off before the request's own bound is unfinished; in the ``last`` round that is an error
    of the engine.
    """
    cut = completion.finish_reason == "abort" or (
        completion.finish_reason == "length" and len(completion.token_ids) < request.sampling.max_tokens
    )
    if cut and last:
        return Progress(
            failure=BackendError(
                f"request {request.id!r} ended after {len(completion.token_ids)} of {request.sampling.max_tokens} "
                f"tokens ({completion.finish_reason}) in its last round, although no abort was requested"
            ),
            rounds=rounds,
        )
    reason = "abort" if cut else completion.finish_reason
    whole = replace(completion, sampling=request.sampling, finish_reason=reason)
    return Progress(whole, rounds=rounds)
