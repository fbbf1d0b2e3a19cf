"""The generator ``transformers``: an asynchronous interface to the decode loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import Completion, VersionSpan
from chatlearn_generator_kit.replica import CLOSED, GeneratorReplica
from chatlearn_hf.checkpoint_names import dtype_name
from chatlearn_hf.model_directory import check_tokenizer_fits, load_causal_lm, load_tokenizer, max_length
from chatlearn_transformers.engine_arguments import check_engine_arguments
from chatlearn_transformers.offload import WeightStore
from chatlearn_transformers.options import TransformersGeneratorOptions
from chatlearn_transformers.probe import start_decoder
from chatlearn_transformers.scheduler import Limits, Scheduler, StepReport
from chatlearn_transformers.sequence_request import SequenceRequest
from chatlearn_transformers.stopping import end_of_sequence_ids
from chatlearn_transformers.weight_loader import TransformersWeightLoader

T = TypeVar("T")


class TransformersGenerator(GeneratorReplica[SequenceRequest]):
    """One replica on one device.

    Forwards run in one worker thread, so the event loop stays free; the composition of a step is decided on the event
    loop between steps. A step starts one event-loop iteration after work appears, so requests submitted in one
    iteration start together, in submission order.
    """

    scores = True
    keeps_ids = True

    def __init__(self, options: TransformersGeneratorOptions, context: RoleContext) -> None:
        """Check the engine arguments. Raises: ConfigError: an argument is unknown or set by the backend."""
        super().__init__("transformers", context, SequenceRequest)
        self._options = options
        self._engine_arguments = check_engine_arguments(context.role, context.engine_arguments)
        self._dropped: set[SequenceRequest] = set()
        """Requests that were dropped while the scheduler had them."""
        self._to_score: list[SequenceRequest] = []
        """Requests from the inbox with given tokens to score."""
        self._kv_offloaded = False
        self._turn = asyncio.Lock()
        """Held during a step and while the scheduler is changed."""
        self._steps = False
        """Whether a step is running; ``offload`` reads it from another thread than the event loop's."""
        self._driver: asyncio.Task[None] | None = None
        self._worker: ThreadPoolExecutor | None = None

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._require_model()
        device = torch.device(self._context.device)
        dtype = _dtype(self._options.dtype, device)
        model: Any = load_causal_lm(
            source.path,
            dtype=dtype,
            device=device,
            attention="eager",  # all models support it; the decoder replaces it
            trust_remote_code=source.trust_remote_code,
            **self._engine_arguments,
        )
        model.requires_grad_(False)
        tokenizer: Any = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        lengths = [n for n in (source.max_length, max_length(model.config)) if n is not None]
        model_length = min(lengths, default=2**31)
        check_tokenizer_fits(tokenizer, model.config, source.path)
        decoder = start_decoder(
            model, source.path, fused_attention=self._options.attention == "sdpa", max_length=model_length
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
        self._loader = TransformersWeightLoader(self, model, source.path, dtype, sync_dtype=self._options.sync_dtype)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._context.role}-decode")
        if self._options.num_threads is not None:
            self._worker.submit(torch.set_num_threads, self._options.num_threads).result()
        self._start_serving(model_length, decoder.vocab_size)

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``.

        Raises:
            BackendError: sequences are running and not paused.
        """
        if not set(parts) & {"weights", "kv_cache"}:
            return
        if self._steps or self.is_generating:
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._scheduler.drop_kv_cache()
        if "kv_cache" in parts:
            self._kv_offloaded = True
        if "weights" in parts:
            self._store.offload()
        if self._context.device.startswith("cuda"):
            torch.cuda.empty_cache()  # free torch's cached memory for other processes on the device

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Sequences kept by a pause recompute their KV cache when they continue."""
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
        """See ``Lifecycle``. Pending requests fail with a ``BackendError``."""
        self._set_dead(CLOSED)
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None
            self._store.onload()
            self._decoder.cache.clear()

    # Generator

    @property
    def loader(self) -> TransformersWeightLoader:
        """See ``Generator``."""
        return self._loader

    def _submit_inbox(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def _drop(self, pending: SequenceRequest) -> None:
        self._dropped.add(pending)

    async def _abort(self, pending: Sequence[SequenceRequest]) -> None:
        async with self._turn:
            self._collect()
            for one in pending:
                if one in self._to_score:
                    self._to_score.remove(one)
                    one.finish(one.unstarted())
            self._deliver(StepReport(finished=self._scheduler.take_out(pending)))

    async def _pause(self) -> None:
        async with self._turn:
            pass  # no step is running, and none will start

    async def _resume(self) -> None:
        self._submit_inbox()

    def _memory_problem(self) -> str | None:
        for part, is_away in (("weights", self._store.holds_weights), ("kv_cache", self._kv_offloaded)):
            if is_away:
                return f"has {part!r} offloaded; onload it before generating"
        return None

    # Replica, for the weight loader

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the weights are offloaded; the model's tensors then have size zero."""
        return self._store.holds_weights

    async def stop_serving(self) -> None:
        """See ``LoadingReplica``."""
        await super().stop_serving()
        async with self._turn:
            pass

    async def serve(self, policy_version: int) -> None:
        """See ``LoadingReplica``."""
        async with self._turn:
            self._scheduler.set_version(policy_version, recompute=self._options.kv_after_sync == "recomputed")
            await super().serve(policy_version)
        self._submit_inbox()

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """See ``LoadingReplica``."""
        async with self._turn:
            await super().die(reason, cause)

    async def in_worker(self, work: Callable[[], T]) -> T:
        """Run blocking work in the worker thread, never during a forward."""
        if self._worker is None:
            raise BackendError(f"{self.name} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # The loop

    async def _drive(self) -> None:
        """Run steps while there is work."""
        while True:
            # Wait one event-loop iteration: all requests submitted in it start together, and a caller that was just
            # answered can submit its next request before the next step is composed.
            await asyncio.sleep(0)
            async with self._turn:
                if self._paused or self._state != "serving" or not self._collect():
                    return
                self._steps = True
                try:
                    report = await self.in_worker(self._step)
                except BaseException as error:
                    # A cancelled driver leaves a step incomplete, so none of its results may be used.
                    self._set_dead(f"generating failed: {type(error).__name__}: {error}", error)
                    if not isinstance(error, Exception):
                        raise
                    return
                finally:
                    self._steps = False
                self._deliver(report)

    def _collect(self) -> bool:
        """Pass new and dropped requests to the scheduler. Returns whether there is work."""
        inbox = self._take_inbox()
        self._to_score += [pending for pending in inbox if pending.request.forced_ids is not None]
        self._scheduler.submit(pending for pending in inbox if pending.request.forced_ids is None)
        if self._dropped:
            self._scheduler.take_out(self._dropped)
            self._dropped = set()
        return self._scheduler.has_work or bool(self._to_score)

    def _step(self) -> StepReport:
        """Score one request if any is waiting; otherwise run a step of the scheduler."""
        if not self._to_score:
            return self._scheduler.step()
        pending = self._to_score.pop(0)
        return StepReport(finished=[] if pending.future.done() else [(pending, self._score_given_tokens(pending))])

    @torch.inference_mode()
    def _score_given_tokens(self, pending: SequenceRequest) -> Completion:
        """Return the given tokens with their logprobs, computed by one forward of the whole sequence."""
        request, forced_ids = pending.request, pending.request.forced_ids
        assert forced_ids is not None, "only such requests are scored"
        tokens = np.concatenate([request.prompt_ids, forced_ids])
        logits = self._decoder.own_logits(tokens[:-1], len(request.prompt_ids) - 1).float()
        ids = torch.from_numpy(forced_ids).to(logits.device)

        def logprobs(temperature: float) -> npt.NDArray[np.float32]:
            scaled = logits / temperature
            values = scaled.gather(-1, ids[:, None]).squeeze(-1) - scaled.logsumexp(-1)
            array: npt.NDArray[np.float32] = values.cpu().numpy()
            return array

        return Completion(
            request.id,
            forced_ids,
            logprobs(request.sampling.temperature or 1.0),
            pending.basis,
            "stop",
            request.sampling,
            (VersionSpan(0, len(forced_ids), self._version),),
            raw_logprobs=logprobs(1.0),
            text=self._decode_text([forced_ids.tolist()], True)[0],
        )

    def _deliver(self, report: StepReport) -> None:
        for pending, start, token_ids in report.progress:
            if not pending.future.done():
                pending.report(self.name, start, token_ids)
        for pending, completion in report.finished:
            pending.finish(completion)

    def _decode_text(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        texts: list[str] = self._tokenizer.batch_decode(
            batch, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return texts


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = dtype_name(torch.bfloat16 if device.type == "cuda" else torch.float32)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
