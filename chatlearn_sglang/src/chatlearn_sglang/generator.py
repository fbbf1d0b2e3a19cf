"""The generator ``sglang``: the adapter in front of one hosted engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import (
    BackendError,
    BackendTimeoutError,
    ConfigError,
    HostedCallError,
    HostedProcessLostError,
)
from chatlearn_core.hosting import HostedProcess
from chatlearn_core.protocols.generator import OnTokens, PauseMode
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState
from chatlearn_hf.checkpoint_names import expected_manifest
from chatlearn_hf.model_directory import check_tokenizer_fits, load_config, load_tokenizer, max_length
from chatlearn_hf.request_checks import check_request
from chatlearn_sglang.engine_arguments import (
    check_architecture,
    check_arguments,
    environment,
    interpreter,
    owned_arguments,
    refused,
)
from chatlearn_sglang.options import SGLangGeneratorOptions
from chatlearn_sglang.served_adapter import AdapterTerms, target_modules
from chatlearn_sglang.ticket import Ticket
from chatlearn_sglang.weight_loader import SGLangWeightLoader

_CLOSED = "the generator was closed"
_PACKAGE = "chatlearn_sglang.engine_side"
_MOVE_TIMEOUT_S = 600.0
"""Longest time that releasing memory, taking it back or measuring it may take."""
_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")
"""What this backend holds, in the order in which it is brought back."""


class SGLangGenerator:
    """One replica: one engine in a process group of its own, on one or several devices.

    Requests go to the engine in the order of their submission. While the replica is paused they are held here.
    """

    def __init__(self, options: SGLangGeneratorOptions, context: RoleContext) -> None:
        """Raises: ConfigError: an engine argument cannot be passed on, or no interpreter holds SGLang."""
        check_arguments(context.role, context.engine_arguments, cpu=context.device == "cpu")
        self._options = options
        self._context = context
        self._python = interpreter(options, context.role)
        self._process: HostedProcess | None = None
        self._loader: SGLangWeightLoader | None = None
        self._state: ReplicaState = "loading"
        self._problem: str | None = "setup has not run"
        self._version = 0
        self._numbers = itertools.count()
        self._tickets: dict[Ticket, None] = {}
        """All that have not been answered, in the order of submission."""
        self._paused = False
        self._draining = False
        """``pause("wait")`` lets the earlier ones finish and holds later ones."""
        self._offloaded: set[MemoryPart] = set()
        self._keeps_memory = False
        """Whether the engine was started without what gives memory back."""

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._context.model
        if source is None:
            raise BackendError(f"{self.name} has no model; set model.path or roles.{self._context.role}.model.path")
        config: Any = load_config(source.path, trust_remote_code=source.trust_remote_code)
        tokenizer = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        check_tokenizer_fits(tokenizer, config, source.path)
        lengths = [n for n in (source.max_length, max_length(config)) if n is not None]
        self._model_length = min(lengths, default=2**31)
        self._vocab_size = int(config.get_text_config().vocab_size)
        cpu = self._context.device == "cpu"
        if cpu:
            check_architecture(config, self._context.role)
        dtype = self._options.dtype
        if dtype == "auto":
            dtype = "float32" if cpu else "bfloat16"

        expected = expected_manifest(source.path, _torch_dtype(dtype))
        lora = self._options.lora
        targets = () if lora is None else target_modules(expected)
        if lora is not None and not targets:
            raise ConfigError(
                f"roles.{self._context.role}.options.lora: no layer of {source.path} is one that this backend serves"
                " adapters for; remove options.lora and set weight_sync.payload to full"
            )
        arguments = dict(self._context.engine_arguments)
        if self._context.world_size > 1:
            arguments.setdefault("tp_size", self._context.world_size)
        self._process = HostedProcess(
            self.name,
            package=_PACKAGE,
            factory=f"{_PACKAGE}.engine:launch",
            arguments={
                "arguments": arguments,
                "owned": owned_arguments(
                    self._context,
                    self._options,
                    dtype=dtype,
                    model_length=self._model_length,
                    lora_targets=targets,
                ),
                "cpu": cpu,
            },
            python=self._python,
            environment=environment(self._options, arguments, cpu=cpu),
        )
        try:
            self._process.start(self._options.start_timeout_s)
            facts = self._process.call("facts", timeout_s=60.0)
        except BackendError as error:
            self._set_dead(f"the engine did not start: {error}")
            if isinstance(error, HostedCallError) and error.type_name == "UnknownArgumentsError":
                raise ConfigError(refused(self._context.role, error.text.splitlines())) from error
            raise
        self._keeps_memory = bool(facts["keeps_memory"])
        loader = SGLangWeightLoader(
            self,
            self._process,
            expected,
            convert_dtype=self._options.sync_dtype == "convert",
            bucket_bytes=self._options.bucket_mb << 20,
            facts=facts,
            adapters=None if lora is None else AdapterTerms(targets, lora.max_rank),
        )
        directory = Path(source.path).expanduser()
        if directory.is_dir():
            loader.load_tied(directory, self._options.start_timeout_s)
        self._loader = loader
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        """See ``Lifecycle``."""
        self._notice_death()
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Sequences kept by a pause compute their KV cache again when they go on.

        Raises:
            BackendError: sequences are running and not paused, or the engine was started without its memory saver.
        """
        wanted = [part for part in _PARTS if part in parts and part not in self._offloaded]
        if not wanted:
            return
        if self._keeps_memory:
            raise BackendError(
                f"{self.name} cannot be offloaded: engine.enable_memory_saver is false; remove it, or set"
                " memory.offload to never and give the role devices of its own"
            )
        if not self._paused and any(ticket.turn is None for ticket in self._tickets):
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._move("release", wanted)
        self._offloaded |= set(wanted)

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``."""
        wanted = [part for part in _PARTS if part in parts and part in self._offloaded]
        if wanted:
            self._move("reclaim", wanted)
            self._offloaded -= set(wanted)

    def live_bytes(self, part: MemoryPart) -> int:
        """See ``MeasuresMemory``: what the engine's schedulers find.

        Raises:
            BackendError: the engine does not answer.
        """
        if part not in _PARTS or self._process is None or self._process.lost is not None:
            return 0
        return int(self._process.call("live_bytes", part, timeout_s=_MOVE_TIMEOUT_S))

    def close(self) -> None:
        """See ``Lifecycle``: requests that wait for an answer get a ``BackendError``."""
        if self._problem != _CLOSED:
            self._set_dead(_CLOSED)
        if self._process is not None:
            self._process.close()

    # Generator

    @property
    def name(self) -> str:
        """For messages: role, replica, backend."""
        return f"generator role {self._context.role!r} replica {self._context.replica} (sglang)"

    @property
    def policy_version(self) -> int:
        """See ``Generator``."""
        return self._version

    @property
    def state(self) -> ReplicaState:
        """See ``Generator``."""
        self._notice_death()
        return self._state

    @property
    def loader(self) -> SGLangWeightLoader:
        """See ``Generator``."""
        assert self._loader is not None, "setup has not run"
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``. While the replica is paused a request waits; it never outlasts ``request.timeout_s``."""
        self._check_serving(request)
        check_request(request, request.sampling.basis, self.name, self._model_length, self._vocab_size)
        prior = request.resume_from
        if prior is not None and len(prior.token_ids) == request.sampling.max_tokens:
            return replace(prior, request_id=request.id, finish_reason="length", sampling=request.sampling)
        loop = asyncio.get_running_loop()
        ticket = Ticket(f"{next(self._numbers):020d}", request, on_tokens, loop.create_future())
        if self._paused or self._draining:
            ticket.turn = loop.create_future()
        self._tickets[ticket] = None
        limit = asyncio.timeout(request.timeout_s)
        try:
            async with limit:
                return await self._answer(ticket)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BackendTimeoutError(
                f"{self.name}: request {request.id!r} ({len(request.prompt_ids)} prompt tokens, max_tokens "
                f"{request.sampling.max_tokens}) had no answer within {request.timeout_s} s; "
                f"{len(self._tickets)} requests were open. Raise its timeout or lower sampling.max_tokens"
            ) from error
        finally:
            del self._tickets[ticket]
            ticket.ended.set_result(None)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See ``Generator``. Unknown ids are ignored: they may have finished just now."""
        tickets = [t for t in self._tickets if request_ids is None or t.request.id in request_ids]
        running = []
        for ticket in tickets:
            ticket.aborted = True
            if ticket.turn is None:
                running.append(ticket)
            elif not ticket.turn.done():
                ticket.turn.set_result(False)
        if running:
            await self._call("abort", [ticket.rid for ticket in running])
        if tickets:
            await asyncio.wait([ticket.ended for ticket in tickets])

    async def pause(self, mode: PauseMode) -> None:
        """See ``Generator``. Requests that arrive while paused wait for ``resume``."""
        if mode == "wait":
            if self._paused and any(ticket.turn is None for ticket in self._tickets):
                raise BackendError(f"{self.name} is paused with unfinished requests; resume it before pause('wait')")
            self._draining = True
            if running := [ticket.ended for ticket in self._tickets if ticket.turn is None]:
                await asyncio.wait(running)
            self._paused = True
        elif mode == "abort":
            self._draining = True
            await self.abort(None)
            self._paused = True
        else:
            self._draining = True
            await self._call("pause")
            self._paused = True

    async def resume(self) -> None:
        """See ``Generator``.

        Raises:
            BackendError: weights or KV cache are offloaded; nothing has changed.
        """
        self._check_onloaded()
        if self._state == "serving":
            await self._call("resume")
        self._paused = self._draining = False
        for ticket in self._tickets:
            if ticket.turn is not None:
                if not ticket.turn.done():
                    ticket.turn.set_result(True)
                ticket.turn = None
            elif ticket.untold:
                ticket.tell()

    # Replica, for the weight loader

    @property
    def is_dead(self) -> bool:
        """Whether only a restart helps."""
        return self.state == "dead"

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the engine has given the weights' memory back."""
        return "weights" in self._offloaded

    def stop_serving(self) -> None:
        """State ``loading``."""
        self._state, self._problem = "loading", "weights are being loaded"

    @property
    def stays_paused(self) -> bool:
        """Whether somebody paused the replica, who will resume it."""
        return self._paused

    def serve(self, policy_version: int) -> None:
        """State ``serving``, under new weights."""
        self._version, self._state, self._problem = policy_version, "serving", None

    def die(self, reason: str) -> None:
        """State ``dead``: every request fails and the engine's processes end."""
        self._set_dead(reason)
        if self._process is not None:
            self._process.close(grace_s=0)

    # Inside

    async def _answer(self, ticket: Ticket) -> Completion:
        """Wait for the ticket's turn, let the engine sample, check what it returns."""
        assert self._process is not None
        request = ticket.request
        try:
            if ticket.turn is not None and not await ticket.turn:
                return ticket.empty()
            reply = await self._process.acall(
                "generate",
                ticket.rid,
                ticket.context(),
                ticket.sampling(),
                on_event=None if ticket.on_tokens is None else lambda tokens: self._on_event(ticket, tokens),
            )
            if ticket.on_tokens is not None:
                ticket.tell()
            return ticket.completion(reply)
        except BackendError as error:
            self._notice_death()
            reason = self._problem if self._state == "dead" else str(error)
            if isinstance(error, HostedCallError):
                reason = error.text
            raise BackendError(f"{self.name}: request {request.id!r} failed: {reason}") from error
        except Exception as error:
            if error is not ticket.callback_error:
                raise
            raise BackendError(
                f"{self.name}, request {request.id!r}: on_tokens raised {type(error).__name__}: {error}"
            ) from error

    def _on_event(self, ticket: Ticket, tokens: list[int]) -> None:
        ticket.untold.extend(tokens)
        if not self._paused:
            ticket.tell()

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self._process is not None, "setup has not run"
        try:
            return await self._process.acall(method, *arguments)
        except HostedProcessLostError:
            self._notice_death()
            raise

    def _move(self, method: str, parts: list[MemoryPart]) -> None:
        assert self._process is not None, "setup has not run"
        try:
            self._process.call(method, list(parts), timeout_s=_MOVE_TIMEOUT_S)
        except BackendError as error:
            # Half of the memory may have moved: nothing that the engine would sample could be trusted.
            self.die(f"{method} of {', '.join(parts)} failed: {error}")
            raise

    def _check_serving(self, request: GenerateRequest) -> None:
        self._notice_death()
        if self._state == "dead" or (self._state == "loading" and not self._paused):
            raise BackendError(
                f"{self.name} is {self._state} and cannot take request {request.id!r}: {self._problem}"
                + ("; restart it" if self._state == "dead" else "; pause it before a sync to let requests wait")
            )
        if not self._paused:
            self._check_onloaded()

    def _check_onloaded(self) -> None:
        if self._offloaded:
            part = next(part for part in _PARTS if part in self._offloaded)
            raise BackendError(f"{self.name} has {part!r} offloaded; onload it before generating")

    def _notice_death(self) -> None:
        if self._state != "dead" and self._process is not None and self._process.lost is not None:
            self._set_dead(self._process.lost)

    def _set_dead(self, reason: str) -> None:
        """Requests at the gate fail here; those in the engine when its process is closed."""
        self._state, self._problem = "dead", reason
        for ticket in self._tickets:
            if ticket.turn is not None and not ticket.turn.done():
                ticket.turn.set_exception(BackendError(reason))


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
