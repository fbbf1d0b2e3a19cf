"""One replica of a generator: its pending requests, its pauses, its state, and how callers learn of its death.

This module has what all generators have in common; a backend adds the calls to its engine.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.protocols.lifecycle import ModelSource, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, LogprobBasis, ReplicaState, SamplingParams
from chatlearn_generator_kit.pending_request import PendingRequest
from chatlearn_generator_kit.request_checks import check_request

P = TypeVar("P", bound=PendingRequest)

CLOSED = "the generator was closed"


class GeneratorReplica(ABC, Generic[P]):
    """Implement ``generate``, ``abort``, ``pause`` and ``resume`` of ``chatlearn_core.protocols.Generator``, and the
    interface for weight loaders (``incoming_weights.LoadingReplica``).

    A request waits in ``_inbox`` until the backend passes it to its engine (``_take_inbox``), and in ``_held`` while
    the replica is paused. Whatever happens to the replica, every call of ``generate`` returns or raises.

    Args:
        backend: name of the backend, for messages.
        context: the role's context.
        request_type: the backend's pending requests, whose further fields have defaults.
    """

    scores: ClassVar[bool] = False
    """Whether the engine supports requests with ``forced_ids``, as the plugin's record declares; otherwise they are
    refused."""
    keeps_ids: ClassVar[bool] = False
    """Likewise for ``SamplingParams.max_kept_ids`` (``GeneratorSpec.kept_ids``)."""

    classifies: bool = False
    """Whether the engine serves a sequence classifier and takes only requests to ``classify``
    (``GeneratorSpec.classifies``)."""

    def __init__(self, backend: str, context: RoleContext, request_type: type[P]) -> None:
        self._context = context
        self._request_type = request_type
        self.name = f"generator role {context.role!r} replica {context.replica} ({backend})"
        """Role, replica and backend, for messages."""
        self._state: ReplicaState = "loading"
        self._problem: str | None = "setup has not run"
        self._version = 0
        self._model_length = self._vocab_size = 0
        self._numbers = itertools.count()
        self._pending: dict[int, P] = {}
        """number -> request, for all unanswered requests."""
        self._inbox: dict[int, P] = {}
        """Submitted requests that the engine does not have yet."""
        self._held: dict[int, P] = {}
        """Requests submitted while the replica is paused."""
        self._paused = False

    # Methods that each backend implements

    @abstractmethod
    def _submit_inbox(self) -> None:
        """React to a new request in the inbox: make sure that ``_take_inbox`` is called soon."""

    @abstractmethod
    def _drop(self, pending: P) -> None:
        """Drop a request that the engine has, because no call waits for it any more."""

    @abstractmethod
    async def _abort(self, pending: Sequence[P]) -> None:
        """End requests that the engine has; each is answered, now or soon, with its partial completion."""

    @abstractmethod
    async def _pause(self) -> None:
        """Stop sampling. When it returns no step is running; the engine keeps its requests."""

    @abstractmethod
    async def _resume(self) -> None:
        """Continue sampling. Requests that arrived in the meantime are in the inbox."""

    @abstractmethod
    def _memory_problem(self) -> str | None:
        """Why missing memory prevents generation, as text to follow the replica's name; None if it does not."""

    def _basis(self, sampling: SamplingParams) -> LogprobBasis:
        """Return the basis of the logprobs that the engine returns."""
        return sampling.basis

    def _find_loss(self) -> str | None:
        """Why the engine is gone, as far as is known without waiting; None if it is not."""
        return None

    # Life cycle

    def _require_model(self) -> ModelSource:
        """Return the role's model. Raises: BackendError: the role has no model."""
        if self._context.model is None:
            raise BackendError(f"{self.name} has no model; set model.path or roles.{self._context.role}.model.path")
        return self._context.model

    def _start_serving(self, model_length: int, vocab_size: int) -> None:
        """Enter the state ``serving``; the last step of ``setup``.

        Args:
            model_length: longest sequence in tokens.
            vocab_size: number of token ids.
        """
        self._model_length, self._vocab_size = model_length, vocab_size
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        """See ``Lifecycle``."""
        self._notice_loss()
        return self._problem

    @property
    def policy_version(self) -> int:
        """See ``Generator``."""
        return self._version

    @property
    def state(self) -> ReplicaState:
        """See ``Generator``."""
        self._notice_loss()
        return self._state

    @property
    def is_generating(self) -> bool:
        """Whether requests are open and sampling is neither paused nor stopped."""
        return bool(self._pending) and not self._paused and self._state == "serving"

    def _notice_loss(self) -> None:
        if self._state != "dead" and (found := self._find_loss()) is not None:
            self._set_dead(found)

    def _set_dead(self, reason: str, cause: BaseException | None = None) -> None:
        """Fail every open request. Keeps the first reason, unless the replica is closed."""
        if self._state == "dead" and reason != CLOSED:
            return
        self._state, self._problem = "dead", reason
        for pending in list(self._pending.values()):
            error = BackendError(f"{self.name}: request {pending.request.id!r} failed: {reason}")
            error.__cause__ = cause
            pending.fail(error)
        self._inbox.clear()
        self._held.clear()

    # Requests

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``. While the replica is paused the request waits, but never longer than
        ``request.timeout_s``.
        """
        self._check_serving(request)
        basis = self._basis(request.sampling)
        check_request(
            request,
            basis,
            self.name,
            self._model_length,
            self._vocab_size,
            scores=self.scores,
            keeps_ids=self.keeps_ids,
            classifies=self.classifies,
        )
        prior = request.resume_from
        if prior is not None and len(prior.token_ids) == request.sampling.max_tokens:
            return replace(prior, request_id=request.id, finish_reason="length", sampling=request.sampling)
        loop = asyncio.get_running_loop()
        pending = self._request_type(next(self._numbers), request, basis, loop.create_future(), on_tokens)
        self._pending[pending.number] = pending
        if self._paused:
            self._held[pending.number] = pending
        else:
            self._inbox[pending.number] = pending
            self._submit_inbox()
        expiry = None
        if request.timeout_s is not None:
            expiry = loop.call_later(request.timeout_s, self._expire, pending)
        try:
            return await pending.future
        finally:
            if expiry is not None:
                expiry.cancel()
            del self._pending[pending.number]
            if not self._recall(pending) and self._state != "dead" and not pending.was_answered:
                self._drop(pending)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See ``Generator``. Unknown ids are ignored, because the requests may have just finished."""
        chosen = [
            pending
            for pending in self._pending.values()
            if (request_ids is None or pending.request.id in request_ids) and not pending.future.done()
        ]
        running: list[P] = []
        for pending in chosen:
            pending.is_aborted = True
            if self._recall(pending):
                pending.finish(pending.unstarted())
            else:
                running.append(pending)
        if running and self._state != "dead":
            await self._abort(running)
        if unanswered := [pending.future for pending in running if not pending.future.done()]:
            await asyncio.wait(unanswered)

    async def pause(self) -> None:
        """See ``Generator``. Requests that arrive while paused wait for ``resume``."""
        self._paused = True
        self._held, self._inbox = self._inbox | self._held, {}
        if self.state != "dead":
            await self._pause()

    async def resume(self) -> None:
        """See ``Generator``.

        Raises:
            BackendError: weights or KV cache are offloaded; the replica stays paused.
        """
        self._check_memory()
        self._paused = False
        self._inbox, self._held = self._inbox | self._held, {}
        if self.state != "dead":
            await self._resume()

    def _take_inbox(self) -> list[P]:
        """Return the requests for the engine, in submission order."""
        inbox, self._inbox = self._inbox, {}
        return [pending for pending in inbox.values() if not pending.future.done()]

    def _recall(self, pending: P) -> bool:
        """Take back a request that the engine does not have yet. Returns whether that was possible."""
        waiting = self._inbox.pop(pending.number, None) or self._held.pop(pending.number, None)
        return waiting is not None

    def _expire(self, pending: P) -> None:
        request = pending.request
        pending.fail(
            BackendTimeoutError(
                f"{self.name}: request {request.id!r} ({len(request.prompt_ids)} prompt tokens, max_tokens "
                f"{request.sampling.max_tokens}) had no answer within {request.timeout_s} s; "
                f"{len(self._pending)} requests were open. Raise its timeout or lower sampling.max_tokens"
            )
        )

    def _check_serving(self, request: GenerateRequest) -> None:
        state = self.state
        if state == "dead" or (state == "loading" and not self._paused):
            remedy = "restart it" if state == "dead" else "pause it before a sync to let requests wait"
            raise BackendError(
                f"{self.name} is {state} and cannot take request {request.id!r}; {remedy}: {self._problem}"
            )
        if not self._paused:
            self._check_memory()

    def _check_memory(self) -> None:
        problem = self._memory_problem()
        if problem is not None:
            raise BackendError(f"{self.name} {problem}")

    # What a weight loader asks for

    @property
    def is_dead(self) -> bool:
        """Whether the replica needs a restart."""
        return self.state == "dead"

    async def stop_serving(self) -> None:
        """See ``LoadingReplica``."""
        self._state, self._problem = "loading", "weights are being loaded"

    async def serve(self, policy_version: int) -> None:
        """See ``LoadingReplica``."""
        if self._state != "loading":
            raise BackendError(f"{self.name} cannot serve version {policy_version}: {self._problem}")
        self._version, self._state, self._problem = policy_version, "serving", None

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """See ``LoadingReplica``."""
        self._set_dead(reason, cause)
