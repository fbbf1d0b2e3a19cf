"""The generator ``acme``."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError
from chatlearn_core.protocols import MemoryPart, OnTokens, RoleContext
from chatlearn_core.types import Completion, FinishReason, GenerateRequest, ReplicaState, VersionSpan
from chatlearn_generator_kit import manifest_of

from acme_plugin.model import (
    END_OF_SEQUENCE,
    TRANSITION,
    UNIGRAM,
    Weights,
    decode,
    read_weights,
)
from acme_plugin.options import AcmeOptions
from acme_plugin.sampling import Draw, draw
from acme_plugin.weight_loader import AcmeWeightLoader


@dataclass(slots=True, eq=False)
class Rollout:
    """One request in progress."""

    request: GenerateRequest
    draws: list[Draw] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Policy version of each draw."""
    aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        """The tokens sampled so far."""
        return [drawn.token for drawn in self.draws]

    def completion(self, reason: FinishReason) -> Completion:
        """The completion so far, with the policy versions that sampled it."""
        changes = [i for i, version in enumerate(self.versions) if i == 0 or version != self.versions[i - 1]]
        spans = zip(changes, [*changes[1:], len(self.versions)], strict=False)
        return Completion(
            request_id=self.request.id,
            token_ids=np.array(self.tokens, dtype=np.int64),
            logprobs=np.array([drawn.logprob for drawn in self.draws], dtype=np.float32),
            basis=self.request.sampling.basis,
            finish_reason=reason,
            sampling=self.request.sampling,
            version_spans=tuple(VersionSpan(start, stop, self.versions[start]) for start, stop in spans),
            raw_logprobs=np.array([drawn.raw_logprob for drawn in self.draws], dtype=np.float32),
            text=decode(self.tokens),
        )


class AcmeGenerator:
    """One replica: every request is a coroutine that samples one token per turn of the event loop.

    Implements ``chatlearn_core.protocols.Generator``.
    """

    def __init__(self, options: AcmeOptions, context: RoleContext) -> None:
        if context.model is None:
            raise ConfigError(f"roles.{context.role}: a generator needs a model; set its model.path")
        if context.engine_arguments:
            raise ConfigError(
                f"roles.{context.role}.engine: 'acme' takes no engine arguments; remove"
                f" {', '.join(sorted(context.engine_arguments))}"
            )
        self.options = options
        self.context = context
        self._source = context.model
        self._weights: Weights = {}
        self._rollouts: list[Rollout] = []
        self._state: ReplicaState = "loading"
        self._problem: str | None = "not set up"
        self._policy_version = 0
        self._paused = False
        self._offloaded: set[MemoryPart] = set()
        self._loader = AcmeWeightLoader(self)

    def setup(self) -> None:
        self._weights = {
            name: tensor.to(self.context.device) for name, tensor in read_weights(Path(self._source.path)).items()
        }
        self._loader.expect(manifest_of(self._weights))
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Move weights to host memory. The model has no KV cache, but sampling requires that it is not offloaded."""
        self._offloaded |= set(parts) & {"weights", "kv_cache"}
        if "weights" in parts:
            self._weights = {name: tensor.cpu() for name, tensor in self._weights.items()}

    def onload(self, parts: Collection[MemoryPart]) -> None:
        self._offloaded -= set(parts)
        if "weights" in parts:
            self._weights = {name: tensor.to(self.context.device) for name, tensor in self._weights.items()}

    def close(self) -> None:
        self.die("the generator was closed")
        self._weights = {}

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def loader(self) -> AcmeWeightLoader:
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See the protocol. Requests to a paused replica wait until it resumes."""
        self._check(request)
        rollout = self._start(request)
        self._rollouts.append(rollout)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await self._sample(rollout, on_tokens)
        except TimeoutError as error:
            raise BackendTimeoutError(
                f"{self.name}: request {request.id!r} had no answer within {request.timeout_s} s, and "
                f"{len(rollout.draws)} of at most {request.sampling.max_tokens} tokens; raise its timeout"
            ) from error
        finally:
            self._rollouts.remove(rollout)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        for rollout in self._rollouts:
            if request_ids is None or rollout.request.id in request_ids:
                rollout.aborted = True

    async def pause(self) -> None:
        self._paused = True

    async def resume(self) -> None:
        self._paused = False

    # For the loader

    @property
    def name(self) -> str:
        """For messages."""
        place = f"role {self.context.role!r} replica {self.context.replica}"
        return f"generator 'acme', {place}"

    @property
    def weights(self) -> Weights:
        """The live tensors."""
        return self._weights

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the weights are offloaded, so that none can be loaded."""
        return "weights" in self._offloaded

    def stop_serving(self) -> None:
        """Stop sampling until ``serve``; open requests keep their tokens."""
        self._state, self._problem = "loading", "weights are being loaded"

    def serve(self, policy_version: int) -> None:
        """Resume sampling with the new weights."""
        self._policy_version, self._state, self._problem = policy_version, "serving", None

    def die(self, reason: str) -> None:
        """Fail every open and later request."""
        self._state, self._problem = "dead", reason

    # Inside

    async def _sample(self, rollout: Rollout, on_tokens: OnTokens | None) -> Completion:
        request, sampling = rollout.request, rollout.request.sampling
        while len(rollout.draws) < sampling.max_tokens:
            # Yield to the event loop, so that other requests, aborts, pauses and weight loads can run.
            await asyncio.sleep(0)
            if rollout.aborted:
                return rollout.completion("abort")
            if self._state == "dead":
                raise BackendError(f"{self.name}: request {request.id!r} failed: {self._problem}; restart the replica")
            if self._paused or self._state == "loading":
                continue
            last = rollout.draws[-1].token if rollout.draws else int(request.prompt_ids[-1])
            logits = self._weights[TRANSITION][last] + self._weights[UNIGRAM]
            drawn = draw(logits, sampling, len(rollout.draws))
            rollout.draws.append(drawn)
            rollout.versions.append(self._policy_version)
            if on_tokens is not None:
                on_tokens(len(rollout.draws) - 1, [drawn.token])
            if drawn.token in sampling.stop_token_ids or (drawn.token == END_OF_SEQUENCE and not sampling.ignore_eos):
                return rollout.completion("stop")
            if sampling.stop and any(stop in decode(rollout.tokens) for stop in sampling.stop):
                return rollout.completion("stop")
        return rollout.completion("length")

    def _start(self, request: GenerateRequest) -> Rollout:
        """A rollout that begins with the tokens of an aborted one."""
        rollout = Rollout(request)
        if (prior := request.resume_from) is not None:
            raw = prior.logprobs if prior.raw_logprobs is None else prior.raw_logprobs
            drawn = zip(prior.token_ids, prior.logprobs, raw, strict=True)
            rollout.draws = [Draw(int(token), float(logprob), float(of_raw)) for token, logprob, of_raw in drawn]
            rollout.versions = [span.version for span in prior.version_spans for _ in range(span.start, span.stop)]
        return rollout

    def _check(self, request: GenerateRequest) -> None:
        """Raise BackendError, naming the request, unless it can be served.

        What follows the state and the parts, ``chatlearn_generator_kit.check_request`` checks for any model in one call.
        """
        where = f"{self.name}, request {request.id!r}"
        if self._state != "serving" and not (self._state == "loading" and self._paused):
            raise BackendError(f"{where}: the replica is {self._state}: {self._problem}")
        if self._offloaded and not self._paused:
            raise BackendError(f"{where}: {', '.join(sorted(self._offloaded))} is offloaded; onload it first")
        if request.forced_ids is not None:
            raise BackendError(f"{where}: it asks for logprobs of given tokens; the record does not declare 'scores'")
        if request.classify:
            raise BackendError(f"{where}: it asks for a classifier's score; the record does not declare 'classifies'")
        vocab_size, num_prompt = len(self._weights[UNIGRAM]), len(request.prompt_ids)
        if not num_prompt or int(request.prompt_ids.min()) < 0 or int(request.prompt_ids.max()) >= vocab_size:
            raise BackendError(f"{where}: a prompt is at least one token, each in [0, {vocab_size})")
        longest = self._source.max_length or self.options.max_length
        if num_prompt + request.sampling.max_tokens > longest:
            raise BackendError(
                f"{where}: {num_prompt} prompt tokens and max_tokens {request.sampling.max_tokens} exceed the "
                f"{longest} tokens of model.max_length; shorten the prompt, or lower sampling.max_tokens"
            )
        if request.resume_from is not None and request.resume_from.basis != request.sampling.basis:
            raise BackendError(
                f"{where}: it resumes logprobs of basis {request.resume_from.basis} with sampling of basis "
                f"{request.sampling.basis}; resume with the same temperature, top_p and top_k"
            )
