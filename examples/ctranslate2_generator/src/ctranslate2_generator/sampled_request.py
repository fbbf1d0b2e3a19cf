"""A request while the engine samples it: decides, token by token, whether sampling goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from chatlearn_core.types import RAW_BASIS, Completion, LogprobBasis
from chatlearn_generator_kit.pending_request import EngineRequest

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class SampledRequest(EngineRequest):
    """A pending request with what the engine's worker thread sampled for it."""

    raw_logprobs: list[float] = field(default_factory=list)
    interrupted: bool = False
    """Set on the event loop: the worker stops after the current token."""

    def decide(self, token: int, logits: npt.NDArray[np.float32] | None, raw_logprob: float, version: int) -> None:
        """Keep a sampled token. ``logits`` [V] are the model's own; None if the basis is raw."""
        logprob = raw_logprob if logits is None else processed_logprob(logits, token, self.basis)
        self.raw_logprobs.append(raw_logprob)
        self.take([token], [logprob], [(0, version)])

    def reason(self, ends: frozenset[int], decode: Decode) -> str | None:
        """Why sampling is over after the newest token; None if it goes on."""
        sampling, token = self.request.sampling, self.token_ids[-1]
        if token in sampling.stop_token_ids or (token in ends and not sampling.ignore_eos):
            return "stop"
        if sampling.stop:
            text = decode(self.all_token_ids())
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(self.token_ids) == self.max_new_tokens else None

    def whole_with_raw(self, reason: str, text: str) -> Completion:
        """The completion, with raw logprobs beside processed ones."""
        made = self.whole(reason, text)
        if made.raw_logprobs is not None:
            return made
        raw = np.array(self.raw_logprobs, dtype=np.float32)
        if self.prior is not None and self.prior.raw_logprobs is not None:
            raw = np.concatenate([self.prior.raw_logprobs, raw])
        return self.completion(made.token_ids, made.logprobs, made.finish_reason, text, raw)


def processed_logprob(logits: npt.NDArray[np.float32], token: int, basis: LogprobBasis) -> float:
    """Logprob of ``token`` after temperature, then top-k, then top-p of the rest, as CTranslate2 applies them.

    Args:
        logits: [V] the model's logits.
        token: the sampled token.
        basis: temperature, top-k and top-p; not the raw basis.
    """
    assert basis != RAW_BASIS
    scaled = logits.astype(np.float64) / basis.temperature
    ranked = np.sort(scaled)[::-1]
    if basis.top_k:
        ranked = ranked[: basis.top_k]
    if basis.top_p < 1.0:
        probabilities = np.exp(ranked - ranked[0])
        before = np.cumsum(probabilities) - probabilities
        ranked = ranked[before < basis.top_p * probabilities.sum()]
    return float(scaled[token] - ranked[0] - np.log(np.exp(ranked - ranked[0]).sum()))


def as_array(logits: Any) -> npt.NDArray[np.float32]:
    """[V] from the engine's [1, V]."""
    return np.array(logits, dtype=np.float32).reshape(-1)
