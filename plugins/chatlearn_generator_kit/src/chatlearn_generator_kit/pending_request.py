"""An unfinished request of a generator: the pending call, and the tokens sampled for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import (
    KEPT_IDS,
    RAW_BASIS,
    Completion,
    FinishReason,
    Floats,
    GenerateRequest,
    LogprobBasis,
    TokenIds,
    VersionSpan,
    continued_spans,
)

_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, its pending call, and the policy versions that sampled its tokens."""

    number: int
    """Submission number; names the request inside an engine, because ids need not be unique."""
    request: GenerateRequest
    basis: LogprobBasis
    """Basis of the completion's logprobs."""
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None = None
    is_aborted: bool = False
    """Whether an abort was requested."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(index of a token, policy version): that version sampled the tokens from this index on. Example: ``[(0, 3), (17,
    4)]``."""
    num_cached_tokens: int = 0
    kept_ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[K] the ids that each new token was sampled from, if ``SamplingParams.max_kept_ids`` asks for them."""

    @property
    def prior(self) -> Completion | None:
        """The completion to resume; None if there is none."""
        return self.request.resume_from

    @property
    def num_prior(self) -> int:
        """Number of tokens in the completion to resume."""
        return 0 if self.prior is None else len(self.prior.token_ids)

    @property
    def max_new_tokens(self) -> int:
        """How many tokens may be sampled beyond those that are resumed."""
        return self.request.sampling.max_tokens - self.num_prior

    def context(self) -> npt.NDArray[np.int64]:
        """Return the tokens before the first one to sample: prompt and resumed tokens, [P + prior]."""
        prompt = np.asarray(self.request.prompt_ids, dtype=np.int64)
        return prompt if self.prior is None else np.concatenate([prompt, self.prior.token_ids])

    def version_spans(self, count: int) -> tuple[VersionSpan, ...]:
        """Return the version spans over [0, count), those of the resumed completion first."""
        bounds = [*(start for start, _ in self.spans[1:]), count]
        return continued_spans(
            self.prior,
            (VersionSpan(start, stop, version) for (start, version), stop in zip(self.spans, bounds, strict=False)),
        )

    def completion(
        self,
        token_ids: TokenIds,
        logprobs: Floats,
        reason: FinishReason,
        text: str,
        raw_logprobs: Floats | None = None,
    ) -> Completion:
        """Return the completion with these tokens; arrays are [C] and include resumed tokens."""
        return Completion(
            request_id=self.request.id,
            token_ids=token_ids,
            logprobs=logprobs,
            basis=self.basis,
            finish_reason=reason,
            sampling=self.request.sampling,
            version_spans=self.version_spans(len(token_ids)),
            raw_logprobs=raw_logprobs,
            text=text,
            num_cached_tokens=self.num_cached_tokens,
            token_data=self._kept_data(len(token_ids)),
        )

    def keep_ids(self, ids: npt.NDArray[np.int32]) -> str | None:
        """Note the ids [K] that the next token was sampled from. Returns why the request fails; None if it does not."""
        most = self.request.sampling.max_kept_ids
        if len(ids) > most:
            return (
                f"token {self.num_prior + len(self.kept_ids)} was sampled from more than max_kept_ids={most} ids: "
                "top_p kept more, or more logits equal the one at which top_k cuts. Raise sampling.max_kept_ids, or "
                "cut at a lower top_k or top_p"
            )
        self.kept_ids.append(ids)
        return None

    def _kept_data(self, count: int) -> dict[str, npt.NDArray[np.generic]]:
        """The ids that ``count`` tokens were sampled from, those of the resumed completion first."""
        most = self.request.sampling.max_kept_ids
        if not most:
            return {}
        kept = np.full((count, most), -1, dtype=np.int32)
        if self.prior is not None:
            kept[: self.num_prior] = self.prior.token_data[KEPT_IDS]
        for row, ids in enumerate(self.kept_ids[: count - self.num_prior], start=self.num_prior):
            kept[row, : len(ids)] = ids
        return {KEPT_IDS: kept}

    def unstarted(self) -> Completion:
        """Return the completion of a request that was aborted before any token was sampled for it."""
        if self.prior is not None:
            prior = self.prior
            return self.completion(prior.token_ids, prior.logprobs, "abort", prior.text, prior.raw_logprobs)
        none = np.zeros(0, dtype=np.float32)
        return self.completion(np.zeros(0, dtype=np.int64), none, "abort", "", none)

    def report(self, generator: str, start: int, token_ids: Sequence[int]) -> bool:
        """Pass new tokens to ``on_tokens``. Returns whether the request continues.

        If the callback raises, the request fails. Tokens of a request that has failed or timed out are not passed on.

        Args:
            generator: name for the message.
            start: position of the first token in the completion.
            token_ids: the sampled tokens.
        """
        if self.on_tokens is None or not token_ids:
            return True
        if self.future.done():
            return False
        try:
            self.on_tokens(start, list(token_ids))
        except Exception as error:
            failure = BackendError(
                f"{generator}, request {self.request.id!r}: on_tokens raised {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.fail(failure)
            return False
        return True

    def finish(self, completion: Completion) -> None:
        """Complete the pending call with ``completion``, if it still waits."""
        if not self.future.done():
            self.future.set_result(completion)

    def fail(self, error: BackendError) -> None:
        """Fail the pending call with ``error``, if it still waits. Any thread may call this."""

        def settle() -> None:
            if not self.future.done():
                self.future.set_exception(error)

        loop = self.future.get_loop()
        if _running_loop() is loop:
            settle()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    @property
    def was_answered(self) -> bool:
        """Whether the pending call has received a completion."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


@dataclass(slots=True, eq=False)
class EngineRequest(PendingRequest):
    """A request of an engine that reports sampled tokens as lists, without the resumed ones."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(
        self, token_ids: Iterable[int], logprobs: Iterable[float | None], spans: Iterable[tuple[int, int]]
    ) -> None:
        """Add sampled tokens.

        Args:
            token_ids: the tokens, in order.
            logprobs: one for each token; None if the engine returned none.
            spans: (index of the first token among these, policy version), in order.
        """
        before = self.num_prior + len(self.token_ids)
        for start, version in spans:
            if not self.spans or self.spans[-1][1] != version:
                self.spans.append((before + start, version))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(float("nan") if value is None else value for value in logprobs)

    def note_cached(self, count: int) -> None:
        """Record how many context tokens the engine took from its cache; only prompt tokens count."""
        self.num_cached_tokens = min(count, len(self.request.prompt_ids))

    def all_token_ids(self) -> list[int]:
        """Return the tokens of the resumed completion, then the new ones."""
        return [*(self.prior.token_ids.tolist() if self.prior is not None else ()), *self.token_ids]

    def problem(self, reason: str | None, said: str = "no reason given") -> str | None:
        """Return why the engine's answer is not a valid completion; None if it is.

        Args:
            reason: the engine's finish reason.
            said: the engine's explanation.
        """
        count, most = len(self.token_ids), self.max_new_tokens
        if reason not in _REASONS or (reason == "abort" and not self.is_aborted):
            return f"the engine ended it with {reason!r}: {said}"
        if len(self.logprobs) != count:
            return f"the engine returned {count} tokens and {len(self.logprobs)} logprobs"
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            return (
                f"the logprob of token {self.num_prior + at} is {self.logprobs[at]}; the weights have overflowed or are"
                " damaged"
            )
        if count > most or (reason == "length" and count < most):
            return f"the engine ended it with reason {reason!r} after {count} of {most} tokens"
        if reason == "stop" and not count:
            return "the engine ended it with reason 'stop' without a token"
        return None

    def classified(self, score: float) -> Completion:
        """Return the answer to a request that classifies."""
        nothing = self.completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop", "")
        return replace(nothing, score=score)

    def whole(self, reason: str, text: str) -> Completion:
        """Return the completion of the resumed and the new tokens.

        Args:
            reason: the engine's finish reason.
            text: text of all tokens.
        """
        logprobs = np.array(self.logprobs, dtype=np.float32)
        if self.prior is not None:
            logprobs = np.concatenate([self.prior.logprobs, logprobs]).astype(np.float32)
        return self.completion(
            np.array(self.all_token_ids(), dtype=np.int64),
            logprobs,
            _REASONS[reason],
            text,
            logprobs if self.basis == RAW_BASIS else None,
        )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
