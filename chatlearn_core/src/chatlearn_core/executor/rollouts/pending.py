"""Rollouts that are not complete: groups of which some samples are finished, some half sampled, some not begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.scheduler import RolloutRequest
from chatlearn_core.types import Completion, ExampleDraw, RemoteCompletion


@dataclass(slots=True, frozen=True, eq=False)
class Progress:
    """How far one sample is."""

    completion: Completion | None = None
    """What has been sampled, finish reason ``abort`` while it is not whole."""
    failure: BackendError | None = None
    """Why there is no completion; the sample is then excluded with its group's others that are trained."""
    rounds: int = 0
    """Rounds that it has been sampled in."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will be sampled."""
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
    """Of each request."""

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
    def has_completion(self) -> bool:
        """Whether something was sampled: a group of failures alone gives a step nothing to train on."""
        return any(progress.completion is not None for progress in self.progress)

    def copy(self) -> Group:
        """With progress and requests of its own."""
        requests = [
            RolloutRequest(request.sample_id, request.draw, request.generate_request) for request in self.requests
        ]
        return Group(requests, list(self.progress))

    def at_hand(self) -> Group:
        """A copy that needs no worker any more: what a replica keeps is lost when it dies."""
        group = self.copy()
        group.progress = [
            replace(progress, completion=None if progress.completion is None else at_hand(progress.completion))
            for progress in group.progress
        ]
        return group


def at_hand(completion: Completion) -> Completion:
    """The completion with its arrays in this process."""
    return completion.fetch() if isinstance(completion, RemoteCompletion) else completion


def groups_of(requests: Iterable[RolloutRequest]) -> list[Group]:
    """New groups, in the order of their requests."""
    found: dict[str, list[RolloutRequest]] = {}
    for request in requests:
        found.setdefault(request.group_id, []).append(request)
    return [Group(members) for members in found.values()]


def num_samples(groups: Sequence[Group]) -> int:
    """Samples of all groups, ended or not."""
    return sum(len(group.requests) for group in groups)
