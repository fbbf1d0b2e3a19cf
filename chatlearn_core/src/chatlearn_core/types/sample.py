"""One training sequence on its way from generation to training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError, UnfetchedError
from chatlearn_core.types.array_ref import ArrayRef, Fill, TextRef, cut, joined, named, unfetched
from chatlearn_core.types.completion import (
    RAW_BASIS,
    Completion,
    FinishReason,
    Floats,
    LogprobBasis,
    SamplingParams,
    VersionSpan,
)
from chatlearn_core.types.example import Example, ExampleDraw
from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.prompt import Media, Prompt, TokenIds

UNGRADED = "ungraded"
"""Component, 1.0, of a reward whose value says only that the sample could not be judged: it took too much time or
memory, or the judge gave no verdict. Counted."""

NOT_SAMPLED = -1
"""``policy_version`` of a token that no policy sampled."""


@pickled_by_position
@dataclass(slots=True, frozen=True)
class RewardResult:
    """The verdict on one sample, or why there is none. Exactly one of ``value`` and ``error`` is set."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    """Named parts, before weighting."""
    token_values: Floats | None = None
    """[T - num_prompt_tokens] optional reward of each token behind the prompt, added to ``value`` at the last one."""
    error: str | None = None
    """What went wrong: an exception, a timeout, a NaN, a wrong count."""

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), "a reward has either a value or an error"


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Turn:
    """What the policy sampled in one go: tokens [start, stop) of a sample's sequence, and how.

    Example: a prompt of 5 tokens and its completion of 3 are ``Turn(start=5, stop=8, finish_reason="stop", ...)``.
    """

    start: int
    stop: int
    finish_reason: FinishReason
    sampling: SamplingParams
    basis: LogprobBasis
    """Of ``generator_logprobs``, or of ``generator_raw_logprobs`` where a sample has only these."""
    version_spans: tuple[VersionSpan, ...]
    """Which policy versions sampled it, counted from ``start``; ``token_data["policy_version"]`` has them by token."""
    text: str = ""
    """The decoded tokens; a ``TextRef`` where they stay with the worker that sampled them."""
    request_id: str = ""
    generator: str = ""
    """Role that sampled it."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence: prompt tokens, what was sampled after them, and all that was computed for them.

    Every per-token array is aligned with ``token_ids``: entry t belongs to token t (a logprob at t is that of token t
    given the tokens before it). Where ``loss_mask`` is False the entry is 0 and has no meaning.

    In the driver of a run over several processes, ``token_ids`` and ``token_data`` may be ``ArrayRef``, which have
    lengths and no values; ``DataStore.get`` gives samples with plain arrays.

    Example: ids [7, 8, 9] answered by [4, 2] give ``token_ids = [7, 8, 9, 4, 2]``, ``num_prompt_tokens = 3``,
    ``loss_mask = [F, F, F, T, T]``, one ``Turn(3, 5, ...)`` and ``token_data["policy_version"] = [-1, -1, -1, 6, 6]``.
    """

    id: str
    """Unique in a run: ``{example id}@{number of its draw}#{index in the group}``."""
    group_id: str
    """Unique in a run: ``{example id}@{number of its draw}``."""
    prompt: Prompt
    token_ids: TokenIds
    """[T] prompt, then whatever followed."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True where the policy sampled (or should imitate) the token."""
    num_prompt_tokens: int = -1
    """Where the first turn begins. -1: as long as ``prompt.token_ids``, which an engine may have expanded."""
    turns: tuple[Turn, ...] = ()
    """In order; empty for demonstrations, and where generation failed."""
    reward: RewardResult | None = None
    unit_id: str = ""
    """Samples of one unit stay together on a rank and in a mini-batch: the two of a pair share it. Empty: ``id``."""
    example_id: str = ""
    """Empty: that of the prompt."""
    media: tuple[Media, ...] = ()
    """What the tokens refer to, in their order, those of the prompt included."""
    token_data: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """name -> [T, ...], for example ``generator_logprobs``, ``policy_version``, ``advantages``."""
    sequence_data: dict[str, float] = field(default_factory=dict)
    """name -> one number for the sequence."""
    exclusion: str | None = None
    """Why this sample is not trained on; None while it is admitted. Counted by reason."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.prompt.token_ids)
        self.unit_id = self.unit_id or self.id
        self.example_id = self.example_id or self.prompt.id

    @property
    def num_completion_tokens(self) -> int:
        """Tokens behind the prompt, those of other parties than the policy included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_ids(self) -> TokenIds:
        """[T - num_prompt_tokens] the tokens behind the prompt."""
        return cut(self.token_ids, self.num_prompt_tokens, len(self.token_ids))

    @property
    def last_turn(self) -> Turn | None:
        """None where nothing was sampled."""
        return self.turns[-1] if self.turns else None

    @property
    def text(self) -> str:
        """What the policy sampled, its turns one after the other; empty where it sampled nothing.

        Raises:
            UnfetchedError: a turn's text stays with the worker that sampled it.
        """
        if any(isinstance(turn.text, TextRef) for turn in self.turns):
            raise UnfetchedError(unfetched(self.id, "text"))
        return "".join(turn.text for turn in self.turns)


RolloutStatus = Literal["finished", "truncated", "failed"]
"""``truncated``: a limit of turns, tokens or time ended it; ``failed``: nothing of it is trained on."""


@dataclass(slots=True, eq=False)
class Rollout:
    """All that came of one attempt at an example: usually one sample, several where sub-agents acted or a context was
    compacted in between.
    """

    id: str
    """``{group id}#{index in the group}``; the samples' ids begin with it."""
    group_id: str
    example: Example
    samples: list[Sample]
    status: RolloutStatus = "finished"
    reward: RewardResult | None = None
    """Of the whole, where what made it judges it; its samples have it, too."""


def sample_from_completion(
    sample_id: str,
    group_id: str,
    prompt: Prompt,
    completion: Completion,
    *,
    example_id: str = "",
    generator: str = "",
) -> Sample:
    """Join a prompt and its completion into one sequence of one turn.

    The prompt's tokens are those that the engine saw, if the completion says (``prompt_ids``). Logprobs of another
    distribution than the one that was sampled from, which the completion's basis states, are called
    ``generator_raw_logprobs``, so that no ratio can be made of them by mistake. References of a completion become
    references of the sample.

    Args:
        example_id: of the example that was drawn; the prompt's by default.
        generator: role that sampled the completion.
    """
    prompt_ids = prompt.token_ids if completion.prompt_ids is None else completion.prompt_ids
    num_prompt, length = len(prompt_ids), len(prompt_ids) + len(completion.token_ids)
    token_ids = named(joined([prompt_ids, completion.token_ids], np.int64), sample_id, "token_ids")
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[num_prompt:] = True
    text: Any = completion.text
    if isinstance(text, TextRef):
        text = replace(text, owner=sample_id)
    turn = Turn(
        num_prompt,
        length,
        completion.finish_reason,
        completion.sampling,
        completion.basis,
        completion.version_spans,
        text,
        completion.request_id,
        generator,
    )
    versions = _stored_versions if isinstance(token_ids, ArrayRef) else policy_versions
    token_data = {"policy_version": versions(num_prompt, completion.version_spans, length)}
    for name, values in _sampled_data(completion).items():
        token_data[name] = _aligned(values, num_prompt, completion.prompt_token_data.get(name))
    token_data = {name: named(values, sample_id, name) for name, values in token_data.items()}
    return Sample(
        sample_id,
        group_id,
        prompt,
        token_ids,
        loss_mask,
        num_prompt_tokens=num_prompt,
        turns=(turn,),
        example_id=example_id,
        media=prompt.media,
        token_data=token_data,
    )


def sample_with_turn(
    sample: Sample, completion: Completion, *, generator: str = "", drop: Collection[str] = ()
) -> Sample:
    """The sample with a completion of all its tokens as a further turn.

    Args:
        completion: of a request whose prompt were the sample's tokens.
        generator: role that sampled the completion.
        drop: data that does not cover the new tokens; the reward is dropped, too.

    Raises:
        BackendError: the engine expanded the sample's tokens again; or one of the two has per-token data that the other
            lacks.
    """
    start, length = len(sample.token_ids), len(sample.token_ids) + len(completion.token_ids)
    if completion.prompt_ids is not None and len(completion.prompt_ids) != start:
        raise BackendError(
            f"sample {sample.id!r}: {generator or 'the generator'} expanded its {start} tokens to "
            f"{len(completion.prompt_ids)} as it sampled a further turn; tokens of earlier turns stay as they are"
        )
    after = sample_from_completion(
        sample.id, sample.group_id, replace(sample.prompt, token_ids=sample.token_ids), completion, generator=generator
    )
    kept = {name: values for name, values in sample.token_data.items() if name not in drop}
    if sample.turns and (odd := sorted(kept.keys() ^ after.token_data.keys())):
        having = "its earlier turns" if odd[0] in kept else "its further turn"
        raise BackendError(
            f"sample {sample.id!r}: only {having} has token_data {odd[0]!r}; what a loss reads, every token must have"
        )
    token_data = {
        name: named(joined([kept[name], cut(values, start, length)]), sample.id, name) if name in kept else values
        for name, values in after.token_data.items()
    }
    return replace(
        sample,
        token_ids=after.token_ids,
        loss_mask=np.concatenate([sample.loss_mask, np.ones(length - start, dtype=np.bool_)]),
        turns=(*sample.turns, *after.turns),
        reward=None,
        token_data=token_data,
        sequence_data={name: number for name, number in sample.sequence_data.items() if name not in drop},
        exclusion=sample.exclusion,
    )


def sample_from_tokens(
    draw: ExampleDraw,
    index: int,
    completion_ids: TokenIds,
    loss_mask: npt.NDArray[np.bool_] | None = None,
) -> Sample:
    """A sample of what the data hold: the prompt of a drawn example, and a completion that no policy sampled.

    Args:
        draw: of the example.
        index: of the sample in the draw's group.
        completion_ids: [C] what follows the prompt.
        loss_mask: [C] True where the token is learned from; by default everywhere.
    """
    prompt = draw.example.prompt
    num_prompt = len(prompt.token_ids)
    token_ids = np.concatenate([prompt.token_ids, completion_ids]).astype(np.int64)
    mask = np.arange(len(token_ids)) >= num_prompt
    if loss_mask is not None:
        mask[num_prompt:] = loss_mask
    return Sample(draw.sample_id(index), draw.group_id, prompt, token_ids, mask, media=prompt.media)


def sample_with_tokens(sample: Sample, token_ids: TokenIds) -> Sample:
    """The sample with tokens behind it that the policy did not sample: its data is 0 there, and the loss mask False.

    Args:
        sample: with plain arrays.
        token_ids: [N]
    """
    added = len(token_ids)
    token_data = {
        name: np.concatenate([values, np.zeros((added, *values.shape[1:]), values.dtype)])
        for name, values in sample.token_data.items()
    }
    if "policy_version" in token_data:
        token_data["policy_version"][len(sample.token_ids) :] = NOT_SAMPLED
    return replace(
        sample,
        token_ids=np.concatenate([sample.token_ids, np.asarray(token_ids, np.int64)]),
        loss_mask=np.concatenate([sample.loss_mask, np.zeros(added, np.bool_)]),
        token_data=token_data,
    )


def generator_logprobs_name(completion: Completion) -> str:
    """What a completion's logprobs are called in ``Sample.token_data``."""
    return "generator_logprobs" if completion.basis == completion.sampling.basis else "generator_raw_logprobs"


def policy_versions(start: int, spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.int32]:
    """[length] the policy version of each token of a sequence, ``NOT_SAMPLED`` where none is known.

    Args:
        start: which token the spans count from.
        spans: of one turn.
        length: of the sequence.
    """
    versions = np.full(length, NOT_SAMPLED, dtype=np.int32)
    for span in spans:
        versions[start + span.start : start + span.stop] = span.version
    return versions


def _stored_versions(start: int, spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.int32]:
    """The same of spans without gaps, without the memory."""
    behind = length - start - (spans[-1].stop if spans else 0)
    fills = [Fill(span.version, span.stop - span.start) for span in spans]
    fills = [Fill(NOT_SAMPLED, start), *fills, Fill(NOT_SAMPLED, behind)]
    return cast(npt.NDArray[np.int32], ArrayRef(fills, (), np.int32))


def _sampled_data(completion: Completion) -> dict[str, npt.NDArray[Any]]:
    """name -> [C, ...] what a completion says of its tokens. Raw logprobs are left out where they are the others."""
    data: dict[str, npt.NDArray[Any]] = {generator_logprobs_name(completion): completion.logprobs}
    if completion.raw_logprobs is not None and completion.basis != RAW_BASIS:
        data["generator_raw_logprobs"] = completion.raw_logprobs
    return data | completion.token_data


def _aligned(values: npt.NDArray[Any], num_prompt: int, prompt_values: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Put [C, ...] completion values behind the prompt's, which are zeros where there are none."""
    if prompt_values is not None:
        return joined([prompt_values, values])
    if isinstance(values, ArrayRef):
        return cast(npt.NDArray[Any], values.behind(Fill(0, num_prompt)))
    return np.concatenate([np.zeros((num_prompt, *values.shape[1:]), dtype=values.dtype), values])
