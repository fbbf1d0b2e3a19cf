"""The samples of a step: requested, in groups of finished rollouts, and as the experience that is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from chatlearn_core.batching import SamplePacker
from chatlearn_core.protocols import OnTokens
from chatlearn_core.types import ExampleDraw, GenerateRequest, Metrics, Prompt, Sample, SamplingParams


@dataclass(slots=True)
class RolloutRequest:
    """The place of one sample in a step: its request, and later the sample itself."""

    sample_id: str
    draw: ExampleDraw
    generate_request: GenerateRequest | None = None
    """None for demonstrations, whose samples exist from the start."""
    sample: Sample | None = None
    left_out: bool = False
    """Whether its generation continues after this run of the flow: no other call is made for it, and it gives no
    sample."""
    sampling: SamplingParams | None = None
    """The step's sampling parameters, for further turns; None: the run's."""
    maker: int | None = None
    """Index of the flow's node that generates it; None if there is only one."""
    extras: list[Sample] = field(default_factory=list)
    """Further samples of the same rollout, which are also trained on and share its reward."""
    dropped: bool = False
    """Whether a call excluded its sample on purpose or could not continue it: later calls skip it."""
    calls_left: int | None = None
    """Calls of the flow's stage that are not done for it yet; None before the stage is run."""
    on_tokens: OnTokens | None = None
    """Called with the request's tokens as they are sampled; see ``RolloutContext.generate``."""

    @property
    def group_id(self) -> str:
        return self.draw.group_id

    @property
    def prompt(self) -> Prompt:
        return self.draw.example.prompt

    @property
    def filled(self) -> Sample:
        """The sample, once it exists."""
        assert self.sample is not None, f"request {self.sample_id} was not filled"
        return self.sample

    @property
    def samples(self) -> list[Sample]:
        """All samples of the rollout, once they exist."""
        return [self.filled, *self.extras]


@dataclass(slots=True, frozen=True, eq=False)
class FinishedGroup:
    """The rollouts of one draw, all ended and scored: the unit of the buffer and of a step."""

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
        return num_sampled_tokens(self.samples)

    def copy(self) -> FinishedGroup:
        """A copy with its own samples, which share their arrays: data and exclusions can be added to them."""
        return FinishedGroup(
            tuple(
                replace(request, sample=_copied(request.filled), extras=[_copied(sample) for sample in request.extras])
                for request in self.requests
            )
        )


def num_sampled_tokens(samples: Sequence[Sample]) -> int:
    """Number of tokens in the samples that a policy sampled."""
    return sum(turn.stop - turn.start for sample in samples for turn in sample.turns)


@dataclass(slots=True)
class Experience:
    """The samples of one step. Samples with an ``exclusion`` are not trained on, but counted."""

    step: int
    samples: list[Sample]
    metrics: Metrics
    packer: SamplePacker = field(default_factory=SamplePacker)
    """Packs the samples, and knows what of them is packed already."""

    @property
    def admitted(self) -> list[Sample]:
        """The samples that are trained on."""
        return [sample for sample in self.samples if sample.exclusion is None]


def without_completion(request: RolloutRequest, reason: str) -> Sample:
    """The excluded sample of a request for which nothing was sampled."""
    tokens = request.prompt.token_ids
    sample = Sample(request.sample_id, request.group_id, request.prompt, tokens, tokens < 0)
    sample.exclusion = reason
    return sample


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
