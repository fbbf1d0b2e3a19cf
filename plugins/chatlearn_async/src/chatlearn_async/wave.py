"""A wave: groups that are drawn together and go through the flow's production stage together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from chatlearn_core.executor.rollouts.pending import Group
from chatlearn_core.executor.step_samples import FinishedGroup, RolloutRequest
from chatlearn_core.metrics import Timers


@dataclass(slots=True, eq=False)
class Wave:
    """One run of the production stage; with ``sync``, that of a step."""

    groups: Sequence[Group]
    """In the order in which they were drawn. Some may be finished already, in a checkpoint."""
    timers: Timers = field(default_factory=Timers)
    task: asyncio.Task[object] | None = None
    """The run of the stage; None before it begins."""
    open_groups: list[Group] = field(init=False)
    """Those that were unfinished when the wave began."""

    def __post_init__(self) -> None:
        self.open_groups = [group for group in self.groups if not group.is_finished]

    @property
    def open_requests(self) -> list[RolloutRequest]:
        """Requests of the groups that were unfinished."""
        return [request for group in self.open_groups for request in group.requests]

    @property
    def is_done(self) -> bool:
        """Whether every group is finished, or the stage failed."""
        return self.task is not None and self.task.done()

    def finished(self) -> list[FinishedGroup]:
        """Its groups, once it is done.

        Raises:
            BackendError: what failed.
        """
        assert self.task is not None, "the wave has begun"
        self.task.result()
        return [FinishedGroup(tuple(group.requests)) for group in self.groups]
