"""Rollouts that may span several steps, and the choice among their kinds by configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chatlearn_core.config.models import RunConfig
from chatlearn_core.executor.rollouts.chunked import ChunkedRollouts
from chatlearn_core.executor.rollouts.manager import Rollouts
from chatlearn_core.executor.rollouts.partial_rollout_step import PartialRolloutStep
from chatlearn_core.executor.rollouts.paused import PausedRollouts
from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.types import Metrics


class PartialRollouts(Protocol):
    """Handles rollouts that may be pending before and after a step.

    Between steps the caller owns the pending groups: ``begin`` works on a copy, so that a failed step changes nothing.
    """

    def num_prompts(self, pending: Sequence[Group]) -> int:
        """Number of new prompts that a step takes in addition to pending ones."""

    def begin(self, pending: Sequence[Group], new: Sequence[RolloutRequest]) -> PartialRolloutStep:
        """The partial rollouts of a step."""

    async def play(self, rollout_step: PartialRolloutStep) -> None:
        """Sample until the step has enough complete groups, at least one; then end it. Errors are raised by the
        step's waiting calls for completions.
        """

    async def finish(self, rollout_step: PartialRolloutStep) -> tuple[tuple[Group, ...], Metrics]:
        """The groups pending after the step, with plain arrays, and their metrics.

        Raises:
            TrainerLostError: a node that held sampled tokens is gone.
        """

    async def weights_changed(self) -> None:
        """Called when every replica serves new weights."""

    async def close(self) -> None:
        """Cancel everything in progress."""


def partial_rollouts(config: RunConfig, rollouts: Rollouts, role: str) -> PartialRollouts | None:
    """The partial rollouts of generator ``role``; None if a step waits for all of its samples."""
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
