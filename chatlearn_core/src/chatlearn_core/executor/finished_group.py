"""A group whose rollouts have all ended and are scored: the unit of the buffer and of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from chatlearn_core.executor.scheduler import RolloutRequest
from chatlearn_core.types import ExampleDraw, Sample


@dataclass(slots=True, frozen=True, eq=False)
class FinishedGroup:
    """The rollouts of one draw, with all results of the flow's production stage."""

    requests: tuple[RolloutRequest, ...]
    """Each request has its sample."""

    @property
    def id(self) -> str:
        return self.draw.group_id

    @property
    def draw(self) -> ExampleDraw:
        return self.requests[0].draw

    @property
    def samples(self) -> list[Sample]:
        """All samples in request order; each request's own sample precedes the further ones of its rollout."""
        return [sample for request in self.requests for sample in request.samples]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens in all samples that a policy sampled."""
        return sum(turn.stop - turn.start for sample in self.samples for turn in sample.turns)

    def copy(self) -> FinishedGroup:
        """A copy with its own samples, which share their arrays: data and exclusions can be added to them."""
        return FinishedGroup(
            tuple(
                replace(request, sample=_copied(request.filled), extras=[_copied(sample) for sample in request.extras])
                for request in self.requests
            )
        )


def finished_groups(requests: Iterable[RolloutRequest]) -> list[FinishedGroup]:
    """The groups of requests that a run of the flow has filled, in request order. Groups with a rollout that was left
    out, because it continues later, are omitted.
    """
    members: dict[str, list[RolloutRequest]] = {}
    for request in requests:
        members.setdefault(request.group_id, []).append(request)
    return [FinishedGroup(tuple(group)) for group in members.values() if not any(r.left_out for r in group)]


def samples_of(groups: Sequence[FinishedGroup]) -> list[Sample]:
    """The samples of all groups, in order."""
    return [sample for group in groups for sample in group.samples]


def _copied(sample: Sample) -> Sample:
    return replace(sample, token_data=dict(sample.token_data), sequence_data=dict(sample.sequence_data))
