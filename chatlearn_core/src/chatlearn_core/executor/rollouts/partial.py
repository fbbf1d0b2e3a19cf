"""Rollouts that last longer than a step: which kind a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chatlearn_core.config.models import RunConfig
from chatlearn_core.executor.rollouts.chunked import ChunkedRollouts
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep
from chatlearn_core.executor.rollouts.paused import PausedRollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.scheduler import RolloutRequest
from chatlearn_core.types import Metrics


class PartialRollouts(Protocol):
    """What a step does with rollouts that were pending before it and may be after it.

    Between steps the pending groups are the caller's: ``begin`` works on a copy of them, so that a step that fails has
    changed nothing.
    """

    def num_prompts(self, pending: Sequence[Group]) -> int:
        """New prompts that a step takes beside what is pending."""

    def begin(self, pending: Sequence[Group], new: Sequence[RolloutRequest]) -> PartialRolloutStep:
        """The partial rollouts of a step."""

    async def play(self, rollout_step: PartialRolloutStep) -> None:
        """Sample until the step has enough complete groups, at least one; then end it. Errors reach those who wait for
        the step's completions.
        """

    async def finish(self, rollout_step: PartialRolloutStep) -> tuple[tuple[Group, ...], Metrics]:
        """What is pending after the step, with plain arrays, and metrics of it.

        Raises:
            TrainerLostError: a node that held what was sampled is gone.
        """

    async def weights_changed(self) -> None:
        """Every replica serves new weights."""

    async def close(self) -> None:
        """Give up whatever goes on."""


def partial_rollouts(config: RunConfig, rollouts: Rollouts, role: str) -> PartialRollouts | None:
    """The partial rollouts of generator ``role``; None where a step waits for all of its samples."""
    rollout, per_step = config.rollout, config.train.prompts_per_step
    if rollout.partial == "resume":
        assert rollout.round_tokens is not None, "cross-checks refuse rounds without an end"
        return ChunkedRollouts(
            rollouts.of(role).generate,
            round_tokens=rollout.round_tokens,
            max_rounds=rollout.max_rounds,
            in_flight_prompts=rollout.in_flight_prompts or per_step,
            data=rollouts.runtime.data,
        )
    if rollout.partial == "keep":
        return PausedRollouts(
            rollouts.of(role).generate,
            lambda: rollouts.runtime.generator(role),
            prompts_per_step=per_step,
            max_rounds=rollout.max_rounds,
            in_flight_prompts=rollout.in_flight_prompts or 2 * per_step,
            data=rollouts.runtime.data,
        )
    return None
