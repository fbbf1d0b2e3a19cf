"""Training sequences, from generation to training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError, UnfetchedError
from chatlearn_core.types.array_ref import ArrayRef, TextRef, cut, fill, joined, named, unfetched
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
"""Reward component set to 1.0 if the sample could not be judged: it took too much time or memory, or the judge gave no
verdict. Counted."""

NOT_SAMPLED = -1
"""``policy_version`` of a token that was not sampled by a policy."""


@pickled_by_position
@dataclass(slots=True, frozen=True)
class RewardResult:
    """The reward of one sample, or the reason why it has none. Exactly one of ``value`` and ``error`` is set.

    Example: ``RewardResult(0.9, components={"correct": 1.0, "length": -0.1})``
    """

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, before weighting."""
    token_values: Floats | None = None
    """[T - num_prompt_tokens] optional reward per token after the prompt; ``value`` is added at the last token."""
    error: str | None = None
    """The failure: an exception, a timeout, a NaN, or a wrong number of results."""
    answer: str | None = None
    """The answer that was graded, in a form that equal answers share; evaluations group the votes of maj@k by it. None:
    the sample gives no answer, or the reward knows of none."""
    step_ends: npt.NDArray[np.int64] | None = None
    """[K] ascending positions in ``token_values`` of the last token of each step; a step's reward is the value there,
    and all other values are 0. None: the reward gives no steps."""

    def __post_init__(self) -> None:
        assert (self.value is None) != (self.error is None), "a reward has either a value or an error"


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class Turn:
    """Tokens [start, stop) of a sample's sequence, which the policy sampled in one request, and how it sampled them.

    Example: a prompt of 5 tokens and its completion of 3 are ``Turn(start=5, stop=8, finish_reason="stop", ...)``.
    """

    start: int
    stop: int
    finish_reason: FinishReason
    sampling: SamplingParams
    basis: LogprobBasis
    """Basis of ``generator_logprobs``, or of ``generator_raw_logprobs`` if the sample has only those."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions that sampled the turn, as spans counted from ``start``; ``token_data["policy_version"]`` has them
    per token."""
    text: str = ""
    """The decoded tokens; a ``TextRef`` if the text stays with the worker that sampled it."""
    request_id: str = ""
    generator: str = ""
    """Name of the generator role that sampled the turn."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence: the prompt's tokens, the tokens after them, and everything computed for them.

    Every per-token array is aligned with ``token_ids``: entry t belongs to token t (a logprob at t is that of token t
    given the tokens before it). Entries where ``loss_mask`` is False are 0 and have no meaning.

    In the driver of a run with several processes, ``token_ids`` and ``token_data`` may be ``ArrayRef``, which have
    lengths but no values; ``DataStore.get`` returns samples with plain arrays.

    Example: ids [7, 8, 9] answered by [4, 2] give ``token_ids = [7, 8, 9, 4, 2]``, ``num_prompt_tokens = 3``,
    ``loss_mask = [F, F, F, T, T]``, one ``Turn(3, 5, ...)`` and ``token_data["policy_version"] = [-1, -1, -1, 6, 6]``.
    """

    id: str
    """Unique in a run: ``{example id}@{number of the draw}#{index in the group}``."""
    group_id: str
    """Unique in a run: ``{example id}@{number of the draw}``."""
    prompt: Prompt
    token_ids: TokenIds
    """[T] the prompt, then the tokens after it."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True where the policy sampled the token or is to imitate it."""
    num_prompt_tokens: int = -1
    """Position at which the first turn begins; the engine may have expanded the prompt. -1 means the length of
    ``prompt.token_ids``."""
    turns: tuple[Turn, ...] = ()
    """Turns in order; empty for demonstrations, and if generation failed."""
    reward: RewardResult | None = None
    unit_id: str = ""
    """Samples of one unit (such as the two of a pair) stay on one rank and in one mini-batch. Empty means ``id``."""
    example_id: str = ""
    """Empty means the prompt's id."""
    media: tuple[Media, ...] = ()
    """The media that the tokens refer to, in token order, including those of the prompt."""
    token_data: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """name -> [T, ...], for example ``generator_logprobs``, ``policy_version``, ``advantages``."""
    sequence_data: dict[str, float] = field(default_factory=dict)
    """name -> one number per sequence."""
    exclusion: str | None = None
    """Reason why the sample is not trained on; None if it is. Counted by reason."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.prompt.token_ids)
        self.unit_id = self.unit_id or self.id
        self.example_id = self.example_id or self.prompt.id

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens after the prompt, including those that the policy did not sample."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_ids(self) -> TokenIds:
        """[T - num_prompt_tokens] the tokens after the prompt."""
        return cut(self.token_ids, self.num_prompt_tokens, len(self.token_ids))

    @property
    def last_turn(self) -> Turn | None:
        """The last turn; None if nothing was sampled."""
        return self.turns[-1] if self.turns else None

    @property
    def text(self) -> str:
        """The text of all turns, concatenated; empty if nothing was sampled.

        Raises:
            UnfetchedError: a turn's text stays with the worker that sampled it.
        """
        if any(isinstance(turn.text, TextRef) for turn in self.turns):
            raise UnfetchedError(unfetched(self.id, "text"))
        return "".join(turn.text for turn in self.turns)


RolloutStatus = Literal["finished", "truncated", "failed"]
"""``truncated``: a limit on turns, tokens or time ended the rollout; ``failed``: none of it is trained on."""


@dataclass(slots=True, eq=False)
class Rollout:
    """The result of one attempt at an example: usually one sample, several if sub-agents acted or a context was
    compacted along the way.
    """

    id: str
    """``{group id}#{index in the group}``; the ids of the samples begin with it."""
    group_id: str
    example: Example
    samples: list[Sample]
    status: RolloutStatus = "finished"
    reward: RewardResult | None = None
    """Reward of the whole rollout, if the environment gives one; samples without one of their own have it, too."""


def sample_from_completion(
    sample_id: str,
    group_id: str,
    prompt: Prompt,
    completion: Completion,
    *,
    example_id: str = "",
    generator: str = "",
) -> Sample:
    """Join a prompt and its completion into a sample of one turn.

    The prompt's tokens are the completion's ``prompt_ids`` if it has them: the prompt as the engine saw it. If the
    completion's basis differs from the distribution that was sampled from, its logprobs are stored as
    ``generator_raw_logprobs``, so that no importance ratio is formed from them by mistake. References in a completion
    become references in the sample.

    Args:
        example_id: id of the drawn example; by default the prompt's.
        generator: role that sampled the completion.
    """
    prompt_ids = prompt.token_ids if completion.prompt_ids is None else completion.prompt_ids
    num_prompt, length = len(prompt_ids), len(prompt_ids) + len(completion.token_ids)
    token_ids = named(joined([prompt_ids, completion.token_ids], np.int64), sample_id, "token_ids")
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[num_prompt:] = True
    text: Any = completion.text
    if isinstance(text, TextRef):
        text = TextRef(text.rows, sample_id)
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
    """The sample extended by a completion as a further turn.

    Args:
        completion: answers a request whose prompt was all the sample's tokens.
        generator: role that sampled the completion.
        drop: names of data to drop because they do not cover the new tokens; the reward is dropped, too.

    Raises:
        BackendError: the engine expanded the sample's tokens again, or only one of sample and completion has some
            per-token data.
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
    for name in sorted(kept.keys() & after.token_data.keys()):
        if kept[name].shape[1:] != after.token_data[name].shape[1:]:
            raise BackendError(
                f"sample {sample.id!r}: rows of token_data {name!r} have shape {kept[name].shape[1:]} in earlier turns "
                f"and {after.token_data[name].shape[1:]} in its further turn; sample all turns with the same settings"
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
    """Make a sample from data alone: the prompt of a drawn example and a completion that no policy sampled.

    Args:
        draw: draw of the example.
        index: index of the sample in the draw's group.
        completion_ids: [C] tokens after the prompt.
        loss_mask: [C] True where the token is trained on; by default everywhere.
    """
    prompt = draw.example.prompt
    num_prompt = len(prompt.token_ids)
    token_ids = np.concatenate([prompt.token_ids, completion_ids]).astype(np.int64)
    mask = np.arange(len(token_ids)) >= num_prompt
    if loss_mask is not None:
        mask[num_prompt:] = loss_mask
    return Sample(draw.sample_id(index), draw.group_id, prompt, token_ids, mask, media=prompt.media)


def sample_with_tokens(sample: Sample, token_ids: TokenIds) -> Sample:
    """The sample extended by tokens that the policy did not sample: their data is 0 and their loss mask False.

    Args:
        sample: has plain arrays.
        token_ids: [N] tokens to append.
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
    """Name of a completion's logprobs in ``Sample.token_data``."""
    return "generator_logprobs" if completion.basis == completion.sampling.basis else "generator_raw_logprobs"


def policy_versions(start: int, spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.int32]:
    """[length] the policy version of each token of a sequence, ``NOT_SAMPLED`` outside the spans.

    Args:
        start: position of the token that the spans count from.
        spans: spans of one turn.
        length: length of the sequence, tokens.
    """
    versions = np.full(length, NOT_SAMPLED, dtype=np.int32)
    for span in spans:
        versions[start + span.start : start + span.stop] = span.version
    return versions


def _stored_versions(start: int, spans: Sequence[VersionSpan], length: int) -> npt.NDArray[np.int32]:
    """Like ``policy_versions`` for spans without gaps, but as a reference that takes no memory per token."""
    fills = [fill(NOT_SAMPLED, start), *(fill(span.version, span.stop - span.start) for span in spans)]
    if behind := length - start - (spans[-1].stop if spans else 0):
        fills.append(fill(NOT_SAMPLED, behind))
    return cast(npt.NDArray[np.int32], ArrayRef(fills, (), np.int32))


def _sampled_data(completion: Completion) -> dict[str, npt.NDArray[Any]]:
    """name -> [C, ...] per-token data of a completion. Raw logprobs are left out if they equal the others."""
    data: dict[str, npt.NDArray[Any]] = {generator_logprobs_name(completion): completion.logprobs}
    if completion.raw_logprobs is not None and completion.basis != RAW_BASIS:
        data["generator_raw_logprobs"] = completion.raw_logprobs
    return data | completion.token_data


def _aligned(values: npt.NDArray[Any], num_prompt: int, prompt_values: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Put [C, ...] completion values after the prompt's values, which are zeros if not given."""
    if prompt_values is not None:
        return joined([prompt_values, values])
    if isinstance(values, ArrayRef):
        return cast(npt.NDArray[Any], values.behind(fill(0, num_prompt)))
    return np.concatenate([np.zeros((num_prompt, *values.shape[1:]), dtype=values.dtype), values])
