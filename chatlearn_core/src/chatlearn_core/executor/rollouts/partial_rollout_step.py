"""One step of partial rollouts: announces each group as soon as it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.types import Completion


class PartialRolloutStep:
    """The groups of a step: those already in flight, oldest first, then new ones.

    This is a ``CompletionSource``: the flow's calls on the generator wait here for their group. A complete group
    continues through the flow at once; groups that are incomplete when the step ends are left out of it.
    """

    turns_together = True

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)
        self.num_rounds = 0
        self.wanted = asyncio.Event()
        """Set when the flow requests the first completion; before that the generator may be offloaded."""
        self._places = {
            request.sample_id: (group, i) for group in self.groups for i, request in enumerate(group.requests)
        }
        assert len(self._places) == len(self.requests), "a sample is in two groups, or twice in one"
        self._known = {group.id: asyncio.Event() for group in self.groups}
        self._error: BaseException | None = None

    @property
    def requests(self) -> list[RolloutRequest]:
        """Requests of all groups, in order."""
        return [request for group in self.groups for request in group.requests]

    @property
    def complete(self) -> list[Group]:
        """Groups whose samples have all ended."""
        return [group for group in self.groups if group.is_complete]

    @property
    def unfinished(self) -> list[Group]:
        """The others."""
        return [group for group in self.groups if not group.is_complete]

    async def completion(self, role: str, request: RolloutRequest) -> Completion | None:
        """See ``CompletionSource``: None if the request's group is not complete in this step."""
        self.wanted.set()
        group, index = self._places[request.sample_id]
        await self._known[group.id].wait()
        if self._error is not None:
            raise self._error
        if not group.is_complete:
            return None
        progress = group.progress[index]
        if progress.failure is not None:
            raise progress.failure
        return progress.completion

    def tell(self, group: Group) -> None:
        """Let the group continue through the flow if it is complete."""
        if group.is_complete:
            self._known[group.id].set()

    def end(self, error: BaseException | None = None) -> None:
        """End sampling for this step. With an ``error``, every waiting call raises it."""
        self._error = error
        for event in self._known.values():
            event.set()
