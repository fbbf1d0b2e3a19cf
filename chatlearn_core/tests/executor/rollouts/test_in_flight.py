"""What all partial rollouts share: how many prompts are in flight, and errors that reach those who wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.executor.rollouts.in_flight import PromptsInFlight
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep


class FailingRollouts(PromptsInFlight):
    """Completes nothing."""

    def __init__(self, error: BaseException) -> None:
        async def generate(request: Any) -> Any:
            raise AssertionError("nothing is asked for")

        super().__init__(generate, max_rounds=1, in_flight_prompts=3)
        self.error = error

    async def _sample(self, rollout_step: PartialRolloutStep) -> None:
        raise self.error


def test_prompts_fill_the_places_that_are_free(play: Any, prompts: Any) -> None:
    partial = FailingRollouts(BackendError(""))
    assert partial.num_prompts(()) == 3
    steps = play(partial, max_tokens=4)
    groups = partial.begin((), steps.requests(prompts[0], 1) + steps.requests(prompts[1], 1)).groups
    assert partial.num_prompts(groups) == 1
    assert partial.num_prompts(groups * 3) == 0, "a lower setting than before lets them run dry first"


def test_a_step_works_on_a_copy_of_what_is_pending(play: Any, prompts: Any) -> None:
    partial = FailingRollouts(BackendError(""))
    pending = partial.begin((), play(partial, max_tokens=4).requests(prompts[0], 1)).groups
    [copy] = partial.begin(pending, []).groups
    assert copy.progress == pending[0].progress
    assert copy.progress is not pending[0].progress
    assert all(new is not old for new, old in zip(copy.requests, pending[0].requests, strict=True))


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (BackendError("cannot pause"), ExceptionGroup),  # by itself it would exclude samples that go on
        (ReplicaLostError("replica 0 died"), ReplicaLostError),
        (OSError("disk"), OSError),
    ],
)
async def test_whoever_waits_for_a_completion_hears_of_an_error(
    error: Exception, heard: type[Exception], play: Any, prompts: Any
) -> None:
    partial = FailingRollouts(error)
    requests = play(partial, max_tokens=4).requests(prompts[0], 1)
    rollout_step = partial.begin((), requests)
    playing = asyncio.create_task(partial.play(rollout_step))
    outcomes = await asyncio.gather(
        *(rollout_step.completion("generator", request) for request in requests), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [heard] * len(requests)
    await playing
