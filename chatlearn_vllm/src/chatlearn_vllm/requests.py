"""Requests on their way to the engine and back: what the engine gets, and what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    FinishReason,
    GenerateRequest,
    LogprobBasis,
    SamplingParams,
    VersionSpan,
    continued_spans,
)

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, the call that waits for it, and what the engine has sampled for it."""

    key: int
    """Its name in the engine."""
    request: GenerateRequest
    basis: LogprobBasis
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    """Those of a resumed completion come from ``request.resume_from``."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first token, policy version): from that token on, that version sampled."""
    num_cached_tokens: int = 0

    @property
    def num_prior(self) -> int:
        """Tokens of what is resumed."""
        prior = self.request.resume_from
        return 0 if prior is None else len(prior.token_ids)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int, num_cached: int | None) -> None:
        """One step's tokens."""
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.num_prior + len(self.token_ids), version))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        if num_cached is not None and not self.num_cached_tokens:
            self.num_cached_tokens = min(num_cached, len(self.request.prompt_ids))

    def all_token_ids(self) -> list[int]:
        """Those of the resumed completion, then the new ones."""
        prior = self.request.resume_from
        return [*(prior.token_ids.tolist() if prior is not None else ()), *self.token_ids]

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Spans over all tokens, those of the resumed completion first."""
        bounds = [*(start for start, _ in self.spans[1:]), self.num_prior + len(self.token_ids)]
        return continued_spans(
            self.request.resume_from,
            (VersionSpan(start, stop, version) for (start, version), stop in zip(self.spans, bounds, strict=False)),
        )

    def problem(self, reason: str, model_length: int) -> str | None:
        """Why what the engine sampled cannot be an answer; None if it can.

        Args:
            reason: the engine's finish reason.
            model_length: longest sequence, tokens.
        """
        count, sampling = self.num_prior + len(self.token_ids), self.request.sampling
        if reason not in _REASONS:
            return f"the engine ended it with {reason!r}"
        if len(self.logprobs) != len(self.token_ids):
            return f"the engine returned {len(self.token_ids)} tokens and {len(self.logprobs)} logprobs"
        if not np.isfinite(self.logprobs).all():
            at = self.num_prior + int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            return (
                f"the logprob of token {at} is {self.logprobs[at - self.num_prior]}; the weights have overflowed or are"
                " damaged"
            )
        room = min(sampling.max_tokens, model_length - len(self.request.prompt_ids))
        if reason == "length" and count < room:
            return f"the engine ended it for its length after {count} of {room} tokens"
        if reason == "stop" and not self.token_ids:
            return "the engine ended it without a token"
        return None

    def completion(self, reason: str, text: str) -> Completion:
        """The answer."""
        prior = self.request.resume_from
        logprobs = np.array(self.logprobs, dtype=np.float32)
        if prior is not None:
            logprobs = np.concatenate([prior.logprobs, logprobs]).astype(np.float32)
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(self.all_token_ids(), dtype=np.int64),
            logprobs=logprobs,
            basis=self.basis,
            finish_reason=_REASONS[reason],
            sampling=self.request.sampling,
            version_spans=self.version_spans(),
            raw_logprobs=logprobs if self.basis == RAW_BASIS else None,
            text=text,
            num_cached_tokens=self.num_cached_tokens,
        )

    def wire(self) -> dict[str, Any]:
        """What the engine gets, in plain builtins."""
        request, sampling = self.request, self.request.sampling
        prior = request.resume_from
        return {
            "key": self.key,
            "prompt_ids": np.asarray(request.prompt_ids).tolist(),
            "prior_ids": [] if prior is None else prior.token_ids.tolist(),
            "max_tokens": sampling.max_tokens - self.num_prior,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": sampling.seed % 2**63,
        }

    def fail(self, error: BackendError) -> None:
        """Let the waiter raise ``error``, if it still waits."""
        if not self.future.done():
            self.future.set_exception(error)


def basis_of(sampling: SamplingParams, logprobs: str) -> LogprobBasis:
    """Of which distribution the engine's logprobs are, under the option ``logprobs``."""
    return RAW_BASIS if logprobs == "raw" else sampling.basis
