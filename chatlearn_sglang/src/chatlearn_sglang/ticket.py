"""One request on its way through the adapter: what the engine gets, and what its answer becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import Completion, FinishReason, GenerateRequest, VersionSpan, continued_spans

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request and the call that waits for it."""

    rid: str
    """Its name in the engine; all have one length, since SGLang aborts by prefix."""
    request: GenerateRequest
    on_tokens: OnTokens | None
    ended: asyncio.Future[None]
    """Done when the request was answered or failed."""
    turn: asyncio.Future[bool] | None = None
    """While held at the gate: True lets it in, False answers it with what it has."""
    aborted: bool = False
    """Somebody asked for its end."""
    untold: list[int] = field(default_factory=list)
    """Tokens that arrived while paused: the engine sampled them before, its detokeniser passed them on after."""
    num_told: int = 0
    callback_error: Exception | None = None

    @property
    def num_prior(self) -> int:
        """Tokens of what is resumed."""
        prior = self.request.resume_from
        return 0 if prior is None else len(prior.token_ids)

    def context(self) -> list[int]:
        """[P + prior] tokens to compute before the first one is sampled."""
        prior = self.request.resume_from
        return [*self.request.prompt_ids.tolist(), *(() if prior is None else prior.token_ids.tolist())]

    def sampling(self) -> dict[str, Any]:
        """Plain sampling parameters of what is left to sample."""
        sampling = self.request.sampling
        return {
            "max_tokens": sampling.max_tokens - self.num_prior,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": int(sampling.seed),
        }

    def tell(self) -> None:
        """Pass on the tokens that were not told yet."""
        tokens, self.untold = self.untold, []
        if tokens and self.on_tokens is not None:
            start = self.num_prior + self.num_told
            self.num_told += len(tokens)
            try:
                self.on_tokens(start, tokens)
            except Exception as error:
                self.callback_error = error
                raise

    def completion(self, reply: Mapping[str, Any]) -> Completion:
        """The answer, resumed tokens first.

        Raises:
            BackendError: what the engine returned cannot be an answer; says why.
        """
        reason = self._reason(reply)
        request, prior = self.request, self.request.resume_from
        token_ids = np.array(reply["token_ids"], dtype=np.int64)
        logprobs = np.array([np.nan if value is None else value for value in reply["logprobs"]], dtype=np.float32)
        if len(logprobs) != len(token_ids):
            raise BackendError(f"the engine returned {len(token_ids)} tokens and {len(logprobs)} logprobs")
        if not np.isfinite(logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise BackendError(
                f"the logprob of token {self.num_prior + at} is {reply['logprobs'][at]}; the weights have overflowed or"
                " are damaged"
            )
        left = request.sampling.max_tokens - self.num_prior
        if len(token_ids) > left or (reason == "length" and len(token_ids) < left):
            raise BackendError(f"the engine ended it with reason {reason!r} after {len(token_ids)} of {left} tokens")
        if reason == "stop" and not len(token_ids):
            raise BackendError("the engine ended it with reason 'stop' without a token")
        text = reply["text"]
        if prior is not None:
            token_ids = np.concatenate([prior.token_ids, token_ids])
            logprobs = np.concatenate([prior.logprobs, logprobs])
            text = prior.text + text
        return Completion(
            request_id=request.id,
            token_ids=token_ids,
            logprobs=logprobs,
            basis=request.sampling.basis,
            finish_reason=reason,
            sampling=request.sampling,
            version_spans=self._spans(reply),
            text=text,
            num_cached_tokens=min(reply["num_cached_tokens"], len(request.prompt_ids)),
        )

    def empty(self) -> Completion:
        """The answer to a request that was aborted before the engine saw it."""
        return self.completion(
            {
                "token_ids": [],
                "logprobs": [],
                "finish": {"type": "abort"},
                "text": "",
                "spans": [],
                "num_cached_tokens": 0,
            }
        )

    def _reason(self, reply: Mapping[str, Any]) -> FinishReason:
        finish = reply["finish"]
        kind = finish.get("type")
        if kind not in _REASONS or (kind == "abort" and not self.aborted):
            raise BackendError(f"the engine ended it with {kind!r}: {finish.get('message', 'no reason given')}")
        return _REASONS[kind]

    def _spans(self, reply: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
        count = len(reply["token_ids"])
        return continued_spans(
            self.request.resume_from,
            (
                VersionSpan(start + self.num_prior, min(stop, count) + self.num_prior, version)
                for start, stop, version in reply["spans"]
            ),
        )
