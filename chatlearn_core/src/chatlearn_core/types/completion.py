"""Requests to a generator and its completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from chatlearn_core.types.pickling import pickled_by_position
from chatlearn_core.types.prompt import Media, TokenIds

FinishReason = Literal["stop", "length", "abort"]
KEPT_IDS = "kept_ids"
"""Name in ``token_data`` of the ids that a token was sampled from, [C, max_kept_ids], -1 after the last id."""
Floats = npt.NDArray[np.float32]


@pickled_by_position
@dataclass(slots=True, frozen=True)
class LogprobBasis:
    """The distribution behind a logprob: the model's logits divided by ``temperature``, then truncated to top-k and
    top-p.

    Two logprobs may be compared, and an importance ratio formed, only if their bases are equal. The raw distribution
    is ``LogprobBasis()``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""

    def __str__(self) -> str:
        if self == RAW_BASIS:
            return "raw"
        return f"processed(temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k})"


RAW_BASIS = LogprobBasis()


@pickled_by_position
@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to sample one completion.

    Raises:
        ValueError: a value is outside its range; names the parameter.
    """

    max_tokens: int
    """Maximum length of the completion, tokens."""
    temperature: float = 1.0
    """0 is greedy; logprobs are then those of the raw distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; the matched text stays in its tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, also under ``ignore_eos``. See ``docs/writing-a-plugin.md``."""
    ignore_eos: bool = False
    """Whether the model's end-of-sequence tokens are ordinary ones."""
    seed: int = 0
    """Keys this request's random numbers: the draw of completion token t depends on (seed, t) alone."""
    max_kept_ids: int = 0
    """Above 0, the completion has ``token_data["kept_ids"]``: for each token the ids that top-k and top-p kept, among
    them the token itself, at most this many. A request whose tokens were sampled from more fails. Greedy sampling keeps
    the sampled token alone."""

    def __post_init__(self) -> None:
        rules = (
            (self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1"),
            (self.temperature >= 0.0, "temperature", self.temperature, "0 (greedy) or more"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (off) or more"),
            (self.max_kept_ids >= 0, "max_kept_ids", self.max_kept_ids, "0 (off) or more"),
        )
        for holds, name, value, rule in rules:
            if not holds:
                raise ValueError(f"sampling parameter {name} is {value!r}; it must be {rule}")

    @property
    def basis(self) -> LogprobBasis:
        """Basis of the distribution that tokens are sampled from."""
        if self.temperature == 0.0:
            return RAW_BASIS
        return LogprobBasis(self.temperature, self.top_p, self.top_k)


@pickled_by_position
@dataclass(slots=True, frozen=True)
class VersionSpan:
    """Policy ``version`` sampled tokens [start, stop) of a completion or turn."""

    start: int
    stop: int
    version: int


@pickled_by_position
@dataclass(slots=True, frozen=True, eq=False)
class GenerateRequest:
    """One completion to sample.

    A resumed request carries the aborted ``Completion`` in ``resume_from``; the returned completion begins with its
    tokens, logprobs and version spans, and ``sampling.max_tokens`` bounds the whole.
    """

    id: str
    prompt_ids: TokenIds
    """[P]"""
    sampling: SamplingParams
    group_id: str = ""
    """Requests of one group share a prompt, so a replica may share the prompt's KV cache among them."""
    resume_from: Completion | None = None
    timeout_s: float | None = None
    media: tuple[Media, ...] = ()
    """Images, videos or sounds that the prompt's tokens refer to. An engine that expands their tokens returns the
    expanded prompt in ``Completion.prompt_ids``."""
    forced_ids: TokenIds | None = None
    """[C] tokens to score instead of sampling: the completion has these tokens with their logprobs, and finish reason
    ``stop``. Only generators that declare ``GeneratorSpec.scores`` accept such a request."""
    classify: bool = False
    """Whether to score the prompt with a sequence classifier instead of sampling: the completion has
    ``Completion.score``, no tokens, and finish reason ``stop``. Only generators that classify accept such a request
    (``GeneratorSpec.classifies``), and they accept no other."""


@dataclass(slots=True, frozen=True, eq=False)
class Completion:
    """One sampled sequence of C tokens; all arrays have length C.

    If a runtime leaves the data with the worker that sampled it, arrays are ``ArrayRef`` and ``text`` is a
    ``TextRef``; ``DataStore.get_completions`` fetches them.
    """

    request_id: str
    token_ids: TokenIds
    """[C] sampled tokens, including the end-of-sequence token if it was sampled."""
    logprobs: Floats
    """[C] logprob of each sampled token under the distribution given by ``basis``."""
    basis: LogprobBasis
    finish_reason: FinishReason
    sampling: SamplingParams
    version_spans: tuple[VersionSpan, ...]
    """Spans that cover [0, C) in order, without gaps."""
    raw_logprobs: Floats | None = None
    """[C] logprobs under the raw distribution, if the generator returns them in addition to ``logprobs``."""
    text: str = ""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV cache was reused instead of computed."""
    token_data: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """name -> [C, ...], for example the routed experts."""
    prompt_ids: TokenIds | None = None
    """[P] the prompt as the engine computed it, if it differs from the request's: after expanding media tokens."""
    prompt_token_data: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """name -> [P, ...] the prompt tokens' part of each name in ``token_data``."""
    score: float | None = None
    """The classifier's output for the prompt, without an activation; None if the request does not ask for it."""


def continued_spans(prior: Completion | None, sampled: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Version spans of a whole completion: those of the completion it resumes, then those sampled since. Empty spans
    are dropped, and neighbours of one version are merged.
    """
    spans = [] if prior is None else list(prior.version_spans)
    for span in sampled:
        if span.start >= span.stop:
            continue
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(spans[-1].start, span.stop, span.version)
        else:
            spans.append(span)
    return tuple(spans)
