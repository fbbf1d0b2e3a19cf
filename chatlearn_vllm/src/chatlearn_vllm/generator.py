"""The generator ``vllm``: the asynchronous face of one engine."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, HostedCallError
from chatlearn_core.protocols.generator import OnTokens, PauseMode
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState
from chatlearn_hf.checkpoint_names import expected_manifest
from chatlearn_hf.model_directory import load_tokenizer
from chatlearn_hf.request_checks import check_request
from chatlearn_vllm.data_parallel import DataParallelHost
from chatlearn_vllm.engine_arguments import data_parallel_size, engine_arguments, num_workers, refused
from chatlearn_vllm.engine_memory import EngineMemory
from chatlearn_vllm.engine_side.driver import Event
from chatlearn_vllm.hosts import ChildHost, EngineHost, InProcessHost
from chatlearn_vllm.options import VLLMGeneratorOptions
from chatlearn_vllm.requests import Ticket, basis_of
from chatlearn_vllm.visible_devices import VARIABLE, visible_devices
from chatlearn_vllm.weight_loader import VLLMWeightLoader

_CLOSED = "the generator was closed"
_CALL_TIMEOUT_S = 600.0
"""Longest time until an engine carries out a command: a step in between takes seconds."""
_MOVE_TIMEOUT_S = 600.0
"""Longest time that giving memory back, taking it again or measuring it may take."""
_PARTS = frozenset({"weights", "kv_cache"})


class VLLMGenerator:
    """One replica: one engine, on one or several devices.

    Requests that are submitted in one turn of the event loop reach the engine together, in their order; what a step
    sampled comes back in one piece.
    """

    def __init__(self, options: VLLMGeneratorOptions, context: RoleContext) -> None:
        """Raises: ConfigError: an engine argument is the backend's own, or the device cannot be used."""
        self._options = options
        self._context = context
        self._arguments = engine_arguments(options, context)
        self._host: EngineHost | None = None
        self._state: ReplicaState = "loading"
        self._problem: str | None = "setup has not run"
        self._version = 0
        self._keys = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        """All that have not been answered, in the order of submission."""
        self._inbox: list[Ticket] = []
        """Submitted in this turn of the event loop."""
        self._held: list[Ticket] = []
        """Submitted while paused."""
        self._paused = False
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory = EngineMemory(self._move, options.sleep_level)
        self._stays_awake: str | None = None
        """Why the engine cannot give memory back."""

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._context.model
        assert source is not None, "engine_arguments has checked it"
        self._tokenizer: Any = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        host = self._make_host()
        try:
            facts = host.start(
                self._arguments, log_level=self._options.log_level, num_threads=self._options.num_threads
            )
        except HostedCallError as error:
            host.close()
            if error.type_name == "UnknownArgumentsError":
                raise ConfigError(refused(self._context.role, error.text.splitlines())) from error
            known = error.type_name == "StartError"  # its message names what it was, and vLLM's last words
            reason = error.text if known else f"{error.type_name}: {error.text}"
            raise BackendError(f"{self.name}: the engine does not start: {reason}") from error
        except BaseException:
            host.close()
            raise
        self._host = host
        self._model_length = int(facts["max_model_len"])
        self._vocab_size = int(facts["vocab_size"])
        self._stays_awake = facts["stays_awake"]
        self._loader = VLLMWeightLoader(
            self,
            host,
            expected_manifest(source.path, getattr(torch, facts["dtype"])),
            num_workers=int(facts["num_workers"]),
            takes_adapters=bool(facts["takes_adapters"]),
            convert_dtype=self._options.sync_dtype == "convert",
            bucket_bytes=self._options.bucket_mb << 20,
        )
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        """See ``Lifecycle``."""
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Requests that a pause keeps compute their context again when they go on.

        The engine cannot give the weights back without the KV cache.

        Raises:
            BackendError: requests are running and not paused; or this engine keeps its memory, the message says why.
        """
        wanted = set(parts) & _PARTS
        if not wanted:
            return
        if self._stays_awake is not None:
            raise BackendError(
                f"{self.name} cannot be offloaded: {self._stays_awake}; or set memory.offload to never, and give the"
                " role devices of its own"
            )
        if self._tickets and not self._paused and self._state == "serving":
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._memory.offload(wanted)

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Weights that sleep level 2 dropped come with the next sync."""
        self._memory.onload(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        """See ``MeasuresMemory``: what the engine's workers find, summed over them.

        Raises:
            BackendError: the engine is gone, or does not answer.
        """
        if self._host is None or self._problem == _CLOSED or part not in _PARTS:
            return 0
        return int(self._move("live_bytes", part))

    def close(self) -> None:
        """See ``Lifecycle``: requests that wait for an answer get a ``BackendError``."""
        if self._problem != _CLOSED:
            self._set_dead(_CLOSED)
        if self._host is not None:
            self._host.close()

    # Generator

    @property
    def name(self) -> str:
        """For messages: role, replica, backend."""
        return f"generator role {self._context.role!r} replica {self._context.replica} (vllm)"

    @property
    def policy_version(self) -> int:
        """See ``Generator``."""
        return self._version

    @property
    def state(self) -> ReplicaState:
        """See ``Generator``."""
        return self._state

    @property
    def loader(self) -> VLLMWeightLoader:
        """See ``Generator``."""
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``. While the replica is paused a request waits; it never outlasts ``request.timeout_s``."""
        self._check_serving(request)
        basis = basis_of(request.sampling, self._options.logprobs)
        check_request(request, basis, self.name, self._model_length, self._vocab_size)
        prior = request.resume_from
        if prior is not None and len(prior.token_ids) == request.sampling.max_tokens:
            return replace(prior, request_id=request.id, finish_reason="length", sampling=request.sampling)
        loop = self._listen()
        ticket = Ticket(next(self._keys), request, basis, loop.create_future(), on_tokens)
        self._tickets[ticket.key] = ticket
        self._send_soon(ticket)
        expiry = None
        if request.timeout_s is not None:
            expiry = loop.call_later(request.timeout_s, self._expire, ticket)
        try:
            return await ticket.future
        finally:
            if expiry is not None:
                expiry.cancel()
            self._withdraw(ticket)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See ``Generator``. Unknown ids are ignored: they may have finished just now."""
        tickets = [t for t in self._tickets.values() if request_ids is None or t.request.id in request_ids]
        self._flush()
        if tickets and self._state != "dead":
            await self._call("abort", [ticket.key for ticket in tickets])
        chosen = set(tickets)
        self._held = [ticket for ticket in self._held if ticket not in chosen]
        self._answer([(ticket, "abort") for ticket in tickets if not ticket.future.done()])

    async def pause(self, mode: PauseMode) -> None:
        """See ``Generator``. Requests that arrive while paused wait for ``resume``."""
        if mode == "wait":
            if self._paused and self._tickets:
                raise BackendError(f"{self.name} is paused with unfinished requests; resume it before pause('wait')")
            self._draining = True
            waiting = [ticket.future for ticket in self._tickets.values() if ticket not in self._held]
            if waiting:
                await asyncio.wait(waiting)
        self._flush()
        self._paused = True
        if self._state != "dead":
            self._listen()
            await self._call("pause")
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        """See ``Generator``.

        Raises:
            BackendError: weights or KV cache are offloaded; nothing has changed.
        """
        self._check_onloaded()
        self._paused = self._draining = False
        held, self._held = self._held, []
        self._inbox.extend(held)
        self._flush()
        if self._state != "dead":
            await self._call("resume")

    # Replica, for the weight loader

    @property
    def is_dead(self) -> bool:
        """Whether only a restart helps."""
        return self._state == "dead"

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the engine has given back the memory of its weights."""
        return "weights" in self._memory.asleep

    async def stop_serving(self) -> None:
        """State ``loading``; what runs is kept."""
        self._listen()
        self._flush()
        self._state, self._problem = "loading", "weights are being loaded"

    async def serve(self, policy_version: int) -> None:
        """State ``serving``, under new weights."""
        if self._state != "loading":
            raise BackendError(f"{self.name} cannot serve version {policy_version}: {self._problem}")
        self._version, self._state, self._problem = policy_version, "serving", None
        self._memory.weights_dropped = False

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """State ``dead``: every request fails."""
        self._set_dead(reason, cause)

    # The engine

    def _make_host(self) -> EngineHost:
        options, device = self._options, self._context.device
        ranks = data_parallel_size(self._context.engine_arguments)
        if options.python is None and options.host == "process" and ranks == 1:
            if device not in ("cpu", "cuda", "cuda:0"):
                raise ConfigError(
                    f"roles.{self._context.role}.device is {device!r}: in the worker's own process vLLM uses the first"
                    f" visible GPU; set roles.{self._context.role}.options.host to child, which sees its own GPUs alone"
                )
            return InProcessHost(self.name, options.start_timeout_s)
        workers = num_workers(self._context.engine_arguments)
        try:
            visible = visible_devices(device, workers, os.environ.get(VARIABLE))
        except ValueError as error:
            raise ConfigError(
                f"roles.{self._context.role}.device is {device!r} with {workers} workers of its engine: {error}. Choose"
                " another device, or fewer of engine.tensor_parallel_size, engine.pipeline_parallel_size and"
                " engine.data_parallel_size"
            ) from None
        environment: dict[str, str | None] = {} if visible is None else {VARIABLE: visible}
        if ranks > 1:
            return DataParallelHost(
                self.name,
                options.start_timeout_s,
                num_ranks=ranks,
                python=options.python,
                environment=environment,
            )
        return ChildHost(self.name, options.start_timeout_s, python=options.python, environment=environment)

    def _require_host(self) -> EngineHost:
        if self._host is None:
            raise BackendError(f"{self.name}: setup has not run")
        return self._host

    def _listen(self) -> asyncio.AbstractEventLoop:
        """Take events on the running loop, once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._require_host().listen(self._on_event)
        return loop

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the driver; an engine that fails, or does not come to it, is dead."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S) as limit:
                return await self._require_host().call(method, *arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            reason = f"its engine did not come to {method!r} within {_CALL_TIMEOUT_S:g} s"
            self._set_dead(reason, error)
            raise BackendTimeoutError(f"{self.name}: {reason}; restart it") from error
        except BackendError as error:
            self._set_dead(str(error), error)
            raise

    def _move(self, method: str, argument: Any) -> Any:
        try:
            return self._require_host().call_blocking(method, argument, timeout_s=_MOVE_TIMEOUT_S)
        except BackendError as error:
            self._set_dead(str(error), error)
            raise

    def _send_soon(self, ticket: Ticket) -> None:
        if self._paused or self._draining:
            self._held.append(ticket)
            return
        self._inbox.append(ticket)
        if len(self._inbox) == 1:
            assert self._loop is not None
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hand over what was submitted in this turn of the event loop."""
        inbox, self._inbox = self._inbox, []
        requests = [ticket.wire() for ticket in inbox if ticket.key in self._tickets and not ticket.future.done()]
        if requests and self._state != "dead":
            self._require_host().submit(requests)

    def _withdraw(self, ticket: Ticket) -> None:
        """The waiting call has its answer, or was cancelled: then the engine need not go on."""
        del self._tickets[ticket.key]
        if ticket in self._inbox or ticket in self._held:
            self._inbox = [other for other in self._inbox if other is not ticket]
            self._held = [other for other in self._held if other is not ticket]
        elif self._state != "dead" and not _was_answered(ticket):
            self._require_host().drop([ticket.key])

    def _on_event(self, event: Event) -> None:
        kind, first, second = event
        if kind == "tokens":
            self._take(first, second)
        elif kind == "refused":
            ticket = self._tickets.get(first)
            if ticket is not None:
                ticket.fail(BackendError(f"{self.name}: the engine refused request {ticket.request.id!r}: {second}"))
        elif self._state != "dead":
            self._set_dead(f"the engine died: {first}")

    def _take(
        self, version: int, reports: Iterable[tuple[int, list[int], list[float], str | None, int | None]]
    ) -> None:
        """One step's tokens."""
        ended: list[tuple[Ticket, str]] = []
        for key, token_ids, logprobs, reason, num_cached in reports:
            ticket = self._tickets.get(key)
            if ticket is None or ticket.future.done():
                continue
            start = ticket.num_prior + len(ticket.token_ids)
            ticket.take(token_ids, logprobs, version, num_cached)
            if ticket.on_tokens is not None and token_ids:
                try:
                    ticket.on_tokens(start, list(token_ids))
                except Exception as error:
                    failure = BackendError(
                        f"{self.name}, request {ticket.request.id!r}: on_tokens raised {type(error).__name__}: {error}"
                    )
                    failure.__cause__ = error
                    ticket.fail(failure)
                    continue
            if reason is not None:
                ended.append((ticket, reason))
        self._answer(ended)

    def _answer(self, ended: list[tuple[Ticket, str]]) -> None:
        """Give the waiting call a completion, or the reason why there is none."""
        whole = []
        for ticket, reason in ended:
            problem = ticket.problem(reason, self._model_length)
            if problem is None:
                whole.append((ticket, reason))
            else:
                ticket.fail(BackendError(f"{self.name}: request {ticket.request.id!r} failed: {problem}"))
        if not whole:
            return
        try:
            texts: list[str] = self._tokenizer.batch_decode(
                [ticket.all_token_ids() for ticket, _ in whole],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        except Exception as error:  # this is a callback of the event loop: those who wait would hear nothing
            for ticket, _ in whole:
                failure = BackendError(
                    f"{self.name}: the tokens of request {ticket.request.id!r} cannot be decoded: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                ticket.fail(failure)
            return
        for (ticket, reason), text in zip(whole, texts, strict=True):
            if not ticket.future.done():
                ticket.future.set_result(ticket.completion(reason, text))

    def _expire(self, ticket: Ticket) -> None:
        request = ticket.request
        ticket.fail(
            BackendTimeoutError(
                f"{self.name}: request {request.id!r} ({len(request.prompt_ids)} prompt tokens, max_tokens "
                f"{request.sampling.max_tokens}) had no answer within {request.timeout_s} s; "
                f"{len(self._tickets)} requests were open. Raise its timeout or lower sampling.max_tokens"
            )
        )

    def _check_serving(self, request: GenerateRequest) -> None:
        if self._state == "dead" or (self._state == "loading" and not self._paused):
            remedy = "restart it" if self._state == "dead" else "pause it before a sync to let requests wait"
            raise BackendError(
                f"{self.name} is {self._state} and cannot take request {request.id!r}; {remedy}: {self._problem}"
            )
        if not self._paused:
            self._check_onloaded()

    def _check_onloaded(self) -> None:
        problem = self._memory.problem()
        if problem is not None:
            raise BackendError(f"{self.name} {problem}")

    def _set_dead(self, reason: str, cause: BaseException | None = None) -> None:
        """Answer every open request with an error."""
        if self._state == "dead" and reason != _CLOSED:
            return  # the first reason is the one that matters
        self._state, self._problem = "dead", reason
        for ticket in self._tickets.values():
            error = BackendError(f"{self.name}: request {ticket.request.id!r} failed: {reason}")
            error.__cause__ = cause
            ticket.fail(error)
        self._inbox.clear()
        self._held.clear()


def _was_answered(ticket: Ticket) -> bool:
    future = ticket.future
    return future.done() and not future.cancelled() and future.exception() is None
