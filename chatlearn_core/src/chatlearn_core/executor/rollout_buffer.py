"""Buffer of finished rollouts between the producer that makes them and the updater that trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.executor.rollouts.saved import describe_finished, restore_finished
from chatlearn_core.executor.rollouts.staleness import oldest_version
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest
from chatlearn_core.protocols import DataStore

STALE = "stale"
"""Exclusion of samples that were evicted from the buffer because too old weights sampled their tokens."""


class RolloutBuffer:
    """Groups of finished rollouts, oldest first. Whole groups enter, and leave for a step or because they are too old.

    Example: under policy version 7 and ``max_staleness=1`` a group with a token that version 5 sampled is evicted.

    Args:
        max_staleness: maximum number of policy versions between the newest weights and those that sampled a token.
        serving: the generators that serve the policy's weights; None: all.
    """

    def __init__(self, max_staleness: int, serving: frozenset[str] | None = None) -> None:
        self.max_staleness = max_staleness
        self.serving = serving
        self._groups: dict[str, FinishedGroup] = {}

    def __len__(self) -> int:
        """Groups that wait."""
        return len(self._groups)

    @property
    def groups(self) -> tuple[FinishedGroup, ...]:
        """The buffered groups, oldest first."""
        return tuple(self._groups.values())

    def admit(self, groups: Iterable[FinishedGroup]) -> None:
        """Append groups to the buffer."""
        for group in groups:
            assert group.id not in self._groups, f"group {group.id} is in the buffer already"
            self._groups[group.id] = group

    def select(self, count: int | None = None) -> list[FinishedGroup]:
        """Remove and return up to ``count`` groups, oldest first; by default all.

        Returns:
            copies, so that a step's changes to samples do not affect the previous step's checkpoint.
        """
        chosen = list(self._groups.values())[:count]
        for group in chosen:
            del self._groups[group.id]
        return [group.copy() for group in chosen]

    def evict(self, policy_version: int) -> list[FinishedGroup]:
        """Remove and return the groups that are too old under this policy version.

        Returns:
            copies whose samples have the exclusion ``stale``; samples excluded before keep their reason.
        """
        evicted: list[FinishedGroup] = []
        for group in self.groups:
            oldest = oldest_version(group.samples, self.serving)
            if oldest is not None and policy_version - oldest > self.max_staleness:
                del self._groups[group.id]
                evicted.append(group.copy())
                for sample in evicted[-1].samples:
                    sample.exclusion = sample.exclusion or (
                        f"{STALE}: version {oldest} sampled it, the policy's is {policy_version}"
                    )
        return evicted

    def copy(self) -> RolloutBuffer:
        """Holds the same groups."""
        buffer = RolloutBuffer(self.max_staleness, self.serving)
        buffer.admit(self.groups)
        return buffer

    async def with_values(self, data: DataStore) -> RolloutBuffer:
        """A buffer with the same groups, whose samples are copies with plain arrays, fetched together.

        Raises:
            TrainerLostError: a node that held some of the values is gone.
        """
        requests = [request for group in self.groups for request in group.requests]
        samples = [sample for request in requests for sample in (request.filled, *request.extras)]
        plain = iter(await data.aget(samples))
        buffer = RolloutBuffer(self.max_staleness, self.serving)
        buffer.admit(
            FinishedGroup(
                tuple(
                    replace(request, sample=next(plain), extras=[next(plain) for _ in request.extras])
                    for request in group.requests
                )
            )
            for group in self.groups
        )
        return buffer

    def clear(self) -> None:
        """Hold nothing."""
        self._groups = {}

    def state_dict(self) -> dict[str, Any]:
        """All groups with their rewards and data (plain arrays only), as JSON values and NumPy arrays."""
        return {"groups": [describe_finished(group) for group in self.groups]}

    def load_state_dict(
        self, state: Mapping[str, Any], requests_of: Callable[[Mapping[str, Any]], Sequence[RolloutRequest]]
    ) -> None:
        """Restore the groups that ``state_dict`` returned.

        Args:
            requests_of: rebuilds the requests of a described group from its example and the run's settings.
        """
        self.clear()
        self.admit(restore_finished(described, requests_of(described)) for described in state["groups"])


def allowed_staleness(rollout: RolloutConfig) -> int:
    """``rollout.max_staleness``, or its default derived from the other settings of the section."""
    if rollout.max_staleness is not None:
        return rollout.max_staleness
    return 0 if rollout.partial == "none" else rollout.max_rounds - 1
