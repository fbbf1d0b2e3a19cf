"""One request on its way through the generator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import (
    Completion,
    FinishReason,
    Floats,
    GenerateRequest,
    TokenIds,
    VersionSpan,
    continued_spans,
)
from chatlearn_transformers.stopping import StopStrings


@dataclass(slots=True, eq=False)
class Ticket:
    """A request, the call that waits for it, and what a row of the slot table does not hold."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None = None
    on_partial: Callable[[Completion], None] | None = None
    watcher: StopStrings | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version): from that token on, that version sampled."""
    num_cached_tokens: int = 0

    @property
    def prior(self) -> Completion | None:
        """What is resumed."""
        return self.request.resume_from

    @property
    def num_prior(self) -> int:
        """Tokens of what is resumed."""
        return 0 if self.prior is None else len(self.prior.token_ids)

    @property
    def max_length(self) -> int:
        """Prompt and completion at their longest."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens

    def context(self) -> npt.NDArray[np.int64]:
        """[P + prior] tokens to compute before the first one is sampled."""
        prompt = np.asarray(self.request.prompt_ids, dtype=np.int64)
        return prompt if self.prior is None else np.concatenate([prompt, self.prior.token_ids])

    def version_spans(self, count: int) -> tuple[VersionSpan, ...]:
        """Spans over [0, count), those of the resumed completion first."""
        bounds = [*(start for start, _ in self.spans[1:]), count]
        return continued_spans(
            self.prior,
            (VersionSpan(start, stop, version) for (start, version), stop in zip(self.spans, bounds, strict=False)),
        )

    def completion(
        self, token_ids: TokenIds, logprobs: Floats, raw_logprobs: Floats, reason: FinishReason, text: str
    ) -> Completion:
        """The answer; arrays are [C], resumed tokens included."""
        without_raw = self.prior is not None and self.prior.raw_logprobs is None and self.num_prior > 0
        return Completion(
            request_id=self.request.id,
            token_ids=token_ids,
            logprobs=logprobs,
            basis=self.request.sampling.basis,
            finish_reason=reason,
            sampling=self.request.sampling,
            version_spans=self.version_spans(len(token_ids)),
            raw_logprobs=None if without_raw else raw_logprobs,
            text=text,
            num_cached_tokens=self.num_cached_tokens,
        )

    def fail(self, error: BackendError) -> None:
        """Let the waiter raise ``error``, if it still waits."""
        if not self.future.done():
            self.future.set_exception(error)
