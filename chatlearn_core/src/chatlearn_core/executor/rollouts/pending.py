"""Incomplete rollouts: groups in which some samples are finished, some partly sampled, some not begun."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.protocols import DataStore
from chatlearn_core.types import Completion, ExampleDraw


@dataclass(slots=True, frozen=True, eq=False)
class Progress:
    """How far one sample is, or one request of its rollout."""

    completion: Completion | None = None
    """The tokens sampled so far; finish reason ``abort`` while it is unfinished."""
    failure: BackendError | None = None
    """Reason why there is no completion; the sample is then excluded when its group is trained on."""
    rounds: int = 0
    """Number of rounds in which it has been sampled."""
    digest: int = 0
    """For an entry of ``turns``: checksum of the request that it answers."""
    turns: Mapping[str, Progress] = field(default_factory=dict)
    """Request id -> how far that request is, for all that its rollout has made; empty for partial rollouts, which make
    one."""

    @property
    def ended(self) -> bool:
        """Whether sampling has ended."""
        finished = self.completion is not None and self.completion.finish_reason != "abort"
        return finished or self.failure is not None

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.completion is None else len(self.completion.token_ids)


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one prompt, which are trained on together once all have ended."""

    requests: list[RolloutRequest]
    progress: list[Progress] = field(default_factory=list)
    """Progress of each request."""

    def __post_init__(self) -> None:
        self.progress = self.progress or [Progress()] * len(self.requests)

    @property
    def id(self) -> str:
        return self.requests[0].group_id

    @property
    def draw(self) -> ExampleDraw:
        return self.requests[0].draw

    @property
    def is_complete(self) -> bool:
        return all(progress.ended for progress in self.progress)

    @property
    def is_finished(self) -> bool:
        """Whether the flow's production stage is over: every request has its sample, scored. Its turn to be trained on
        has not come, because groups drawn before it are unfinished."""
        return all(request.calls_left == 0 for request in self.requests)

    @property
    def has_completion(self) -> bool:
        """Whether at least one completion exists: a group of failures gives a step nothing to train on."""
        return any(progress.completion is not None for progress in self.progress)

    def copy(self) -> Group:
        """A copy with its own progress and requests."""
        requests = [
            RolloutRequest(request.sample_id, request.draw, request.generate_request) for request in self.requests
        ]
        return Group(requests, list(self.progress))


async def with_values(groups: Sequence[Group], data: DataStore) -> tuple[Group, ...]:
    """Copies of groups with the values of their completions, fetched together, so that they survive the loss of a
    worker's node.

    Raises:
        TrainerLostError: a node that held some values is gone.
    """
    copies = [group.copy() for group in groups]
    found = [progress.completion for group in copies for progress in group.progress if progress.completion is not None]
    plain = iter(await data.aget_completions(found))
    for group in copies:
        group.progress = [
            progress if progress.completion is None else replace(progress, completion=next(plain))
            for progress in group.progress
        ]
    return tuple(copies)


def groups_of(requests: Iterable[RolloutRequest]) -> list[Group]:
    """New groups, in request order."""
    found: dict[str, list[RolloutRequest]] = {}
    for request in requests:
        found.setdefault(request.group_id, []).append(request)
    return [Group(members) for members in found.values()]


def num_samples(groups: Sequence[Group]) -> int:
    """Number of samples in all groups, ended or not."""
    return sum(len(group.requests) for group in groups)
