"""The generator ``transformers``: the asynchronous face of the decode loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols.generator import OnTokens, PauseMode
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import Completion, GenerateRequest, ReplicaState
from chatlearn_hf.checkpoint_names import dtype_name
from chatlearn_hf.model_directory import check_tokenizer_fits, load_causal_lm, load_tokenizer, max_length
from chatlearn_hf.request_checks import check_request
from chatlearn_transformers.engine_arguments import check_engine_arguments
from chatlearn_transformers.offload import WeightStore
from chatlearn_transformers.options import TransformersGeneratorOptions
from chatlearn_transformers.probe import start_decoder
from chatlearn_transformers.scheduler import Limits, Scheduler, StepReport
from chatlearn_transformers.stopping import end_of_sequence_ids
from chatlearn_transformers.ticket import Ticket
from chatlearn_transformers.weight_loader import TransformersWeightLoader

T = TypeVar("T")


class TransformersGenerator:
    """One replica on one device.

    Forwards run in one worker thread, so the event loop stays free; what a step works on is decided on the event loop
    between steps. A step begins one turn of the loop after work appears: requests that are submitted in one turn start
    together, in the order of their submission.
    """

    def __init__(self, options: TransformersGeneratorOptions, context: RoleContext) -> None:
        """Raises: ConfigError: an engine argument is unknown or the backend's own."""
        self._options = options
        self._context = context
        self._engine_arguments = check_engine_arguments(context.role, context.engine_arguments)
        self._state: ReplicaState = "loading"
        self._problem: str | None = "setup has not run"
        self._inbox: list[Ticket] = []
        self._held: list[Ticket] = []
        """Submitted while ``pause("wait")`` lets earlier ones finish."""
        self._tickets: dict[Ticket, None] = {}
        """All that have not been answered, in the order of submission."""
        self._dropped: set[Ticket] = set()
        self._paused = False
        self._draining = False
        self._kv_offloaded = False
        self._turn = asyncio.Lock()
        """Held while a step runs and while the scheduler is changed."""
        self._steps = False
        """Whether a step runs: read by ``offload``, which comes from another thread than the event loop's."""
        self._driver: asyncio.Task[None] | None = None
        self._worker: ThreadPoolExecutor | None = None

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._context.model
        if source is None:
            raise BackendError(f"{self.name} has no model; set model.path or roles.{self._context.role}.model.path")
        device = torch.device(self._context.device)
        dtype = _dtype(self._options.dtype, device)
        model: Any = load_causal_lm(
            source.path,
            dtype=dtype,
            device=device,
            attention="eager",  # all have it; the decoder puts its own in place
            trust_remote_code=source.trust_remote_code,
            **self._engine_arguments,
        )
        model.requires_grad_(False)
        tokenizer: Any = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        lengths = [n for n in (source.max_length, max_length(model.config)) if n is not None]
        self._model_length = min(lengths, default=2**31)
        check_tokenizer_fits(tokenizer, model.config, source.path)
        decoder = start_decoder(
            model, source.path, fused_attention=self._options.attention == "sdpa", max_length=self._model_length
        )
        self._tokenizer = tokenizer
        self._store = WeightStore(model)
        kv_gb = self._options.max_kv_cache_gb
        self._scheduler = Scheduler(
            decoder,
            Limits(
                max_num_sequences=self._options.max_num_sequences,
                max_prefill_tokens=self._options.max_prefill_tokens,
                max_kv_bytes=float("inf") if kv_gb is None else kv_gb * 2**30,
                share_prefixes=self._options.share_prefixes,
            ),
            end_of_sequence_ids(model.config, model.generation_config, tokenizer, decoder.vocab_size),
            self._decode_text,
        )
        self._decoder = decoder
        self._loader = TransformersWeightLoader(
            self, model, source.path, dtype, convert_dtype=self._options.sync_dtype == "convert"
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._context.role}-decode")
        if self._options.num_threads is not None:
            self._worker.submit(torch.set_num_threads, self._options.num_threads).result()
        self._state, self._problem = "serving", None

    def health(self) -> str | None:
        """See ``Lifecycle``."""
        return self._problem

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``.

        Raises:
            BackendError: sequences are running and not paused.
        """
        if not set(parts) & {"weights", "kv_cache"}:
            return
        if self._is_working:
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._scheduler.drop_kv_cache()
        if "kv_cache" in parts:
            self._kv_offloaded = True
        if "weights" in parts:
            self._store.offload()
        if self._context.device.startswith("cuda"):
            torch.cuda.empty_cache()  # what torch keeps for itself, other processes on the device cannot have

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Sequences kept by a pause compute their KV cache again when they go on."""
        if "weights" in parts:
            self._store.onload()
        if "kv_cache" in parts:
            self._kv_offloaded = False

    def live_bytes(self, part: MemoryPart) -> int:
        """See ``MeasuresMemory``."""
        if self._worker is None:
            return 0
        if part == "weights":
            return self._store.live_bytes
        return self._decoder.cache.num_bytes if part == "kv_cache" else 0

    def close(self) -> None:
        """See ``Lifecycle``: requests that wait for an answer get a ``BackendError``."""
        if self._state != "dead" or self._problem != _CLOSED:
            self._set_dead(_CLOSED)
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None
            self._store.onload()
            self._decoder.cache.clear()

    # Generator

    @property
    def name(self) -> str:
        """For messages: role, replica, backend."""
        return f"generator role {self._context.role!r} replica {self._context.replica} (transformers)"

    @property
    def policy_version(self) -> int:
        """See ``Generator``."""
        return self._scheduler.policy_version

    @property
    def state(self) -> ReplicaState:
        """See ``Generator``."""
        return self._state

    @property
    def loader(self) -> TransformersWeightLoader:
        """See ``Generator``."""
        return self._loader

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        """See ``Generator``. While the replica is paused a request waits; it never outlasts ``request.timeout_s``."""
        return await self._generate(request, on_tokens)

    async def _generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        on_partial: Callable[[Completion], None] | None = None,
    ) -> Completion:
        self._check_serving(request)
        check_request(request, request.sampling.basis, self.name, self._model_length, self._decoder.vocab_size)
        prior = request.resume_from
        if prior is not None and len(prior.token_ids) == request.sampling.max_tokens:
            return replace(prior, request_id=request.id, finish_reason="length", sampling=request.sampling)

        loop = asyncio.get_running_loop()
        ticket = Ticket(request, loop.create_future(), on_tokens, on_partial)
        self._tickets[ticket] = None
        (self._held if self._draining else self._inbox).append(ticket)
        self._wake()
        expiry = None
        if request.timeout_s is not None:
            expiry = loop.call_later(request.timeout_s, self._expire, ticket)
        try:
            return await ticket.future
        finally:
            if expiry is not None:
                expiry.cancel()
            del self._tickets[ticket]
            if not _was_answered(ticket):
                self._dropped.add(ticket)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Completion]:
        """See ``StreamingGenerator``. The finish reason of a partial completion is ``abort``."""
        partials: asyncio.Queue[Completion | None] = asyncio.Queue()
        task = asyncio.create_task(self._generate(request, on_partial=partials.put_nowait))
        task.add_done_callback(lambda _: partials.put_nowait(None))
        try:
            while (partial := await partials.get()) is not None:
                yield partial
            yield task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """See ``Generator``. Unknown ids are ignored: they may have finished just now."""
        async with self._turn:
            self._abort(None if request_ids is None else frozenset(request_ids))

    async def pause(self, mode: PauseMode) -> None:
        """See ``Generator``. Requests that arrive while paused wait for ``resume``."""
        if mode == "wait":
            if self._paused and self._tickets:
                raise BackendError(f"{self.name} is paused with unfinished requests; resume it before pause('wait')")
            self._draining = True
            waiting = [ticket.future for ticket in self._tickets if ticket not in self._held]
            if waiting:
                await asyncio.wait(waiting)
        self._paused = True
        async with self._turn:
            if mode == "abort":
                self._abort(None)

    async def resume(self) -> None:
        """See ``Generator``.

        Raises:
            BackendError: weights or KV cache are offloaded; nothing has changed.
        """
        self._check_onloaded()
        self._paused = self._draining = False
        self._inbox.extend(self._held)
        self._held.clear()
        self._wake()

    # Replica, for the weight loader

    @property
    def is_dead(self) -> bool:
        """Whether only a restart helps."""
        return self._state == "dead"

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the model's tensors have size zero."""
        return self._store.holds_weights

    async def stop_serving(self) -> None:
        """See ``weight_loader.Replica``."""
        self._state, self._problem = "loading", "weights are being loaded"
        async with self._turn:
            pass

    async def serve(self, policy_version: int) -> None:
        """See ``weight_loader.Replica``."""
        async with self._turn:
            self._scheduler.set_version(policy_version, recompute=self._options.kv_after_sync == "recompute")
            self._state, self._problem = "serving", None
        self._wake()

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """See ``weight_loader.Replica``."""
        async with self._turn:
            self._set_dead(reason, cause)

    async def in_worker(self, work: Callable[[], T]) -> T:
        """See ``weight_loader.Replica``."""
        if self._worker is None:
            raise BackendError(f"{self.name} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # The loop

    @property
    def _is_working(self) -> bool:
        return self._steps or (bool(self._tickets) and not self._paused and self._state == "serving")

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is work."""
        while True:
            # One turn of the event loop: all that is submitted in it starts together, and whoever was just answered
            # can submit what follows before the next step is composed.
            await asyncio.sleep(0)
            async with self._turn:
                if self._paused or self._state != "serving" or not self._collect():
                    return
                self._steps = True
                try:
                    report = await self.in_worker(self._scheduler.step)
                except BaseException as error:
                    # A cancelled driver leaves a step half observed: no result may be served from it.
                    self._set_dead(f"generating failed: {type(error).__name__}: {error}", error)
                    if not isinstance(error, Exception):
                        raise
                    return
                finally:
                    self._steps = False
                self._deliver(report)

    def _collect(self) -> bool:
        """Bring the scheduler up to date with what was asked for; whether it has work."""
        dropped, self._dropped = self._dropped, set()
        self._scheduler.submit(ticket for ticket in self._inbox if ticket not in dropped)
        self._inbox.clear()
        if dropped:
            self._scheduler.take_out(dropped)
        return self._scheduler.has_work

    def _deliver(self, report: StepReport) -> None:
        for ticket, partial in report.partials:
            if ticket.future.done():
                continue
            if ticket.on_partial is not None:
                ticket.on_partial(partial)
            try:
                if ticket.on_tokens is not None:
                    start = len(partial.token_ids) - 1
                    ticket.on_tokens(start, partial.token_ids[start:].tolist())
            except Exception as error:
                failure = BackendError(
                    f"{self.name}, request {ticket.request.id!r}: on_tokens raised {type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                ticket.fail(failure)
                self._dropped.add(ticket)
        for ticket, completion in report.finished:
            if not ticket.future.done():
                ticket.future.set_result(completion)

    def _abort(self, request_ids: frozenset[str] | None) -> None:
        """The caller holds the turn."""
        self._collect()
        tickets = {t for t in self._tickets if request_ids is None or t.request.id in request_ids}
        held = [ticket for ticket in self._held if ticket in tickets]
        self._held = [ticket for ticket in self._held if ticket not in tickets]
        self._scheduler.submit(held)
        self._deliver(StepReport(finished=self._scheduler.take_out(tickets)))

    def _expire(self, ticket: Ticket) -> None:
        request = ticket.request
        ticket.fail(
            BackendTimeoutError(
                f"{self.name}: request {request.id!r} ({len(request.prompt_ids)} prompt tokens, max_tokens "
                f"{request.sampling.max_tokens}) had no answer within {request.timeout_s} s; "
                f"{len(self._tickets)} requests were open. Raise its timeout or lower sampling.max_tokens"
            )
        )
        self._dropped.add(ticket)

    def _check_serving(self, request: GenerateRequest) -> None:
        if self._state == "dead" or (self._state == "loading" and not self._paused):
            raise BackendError(
                f"{self.name} is {self._state} and cannot take request {request.id!r}: {self._problem}"
                + ("; restart it" if self._state == "dead" else "; pause it before a sync to let requests wait")
            )
        if not self._paused:
            self._check_onloaded()

    def _check_onloaded(self) -> None:
        if self._store.holds_weights or self._kv_offloaded:
            part = "weights" if self._store.holds_weights else "kv_cache"
            raise BackendError(f"{self.name} has {part!r} offloaded; onload it before generating")

    def _set_dead(self, reason: str, cause: BaseException | None = None) -> None:
        """Answer every open request with an error."""
        self._state, self._problem = "dead", reason
        for ticket in self._tickets:
            error = BackendError(f"{self.name}: request {ticket.request.id!r} failed: {reason}")
            error.__cause__ = cause
            ticket.fail(error)
        self._inbox.clear()
        self._held.clear()

    def _decode_text(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            batch, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return texts


_CLOSED = "the generator was closed"


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = dtype_name(torch.bfloat16 if device.type == "cuda" else torch.float32)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _was_answered(ticket: Ticket) -> bool:
    future = ticket.future
    return future.done() and not future.cancelled() and future.exception() is None
