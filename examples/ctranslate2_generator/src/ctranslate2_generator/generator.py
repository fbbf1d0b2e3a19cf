"""The generator ``ctranslate2``: each request is one call of the engine in a worker thread."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ctranslate2

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import RAW_BASIS
from chatlearn_generator_kit.engine_arguments import refused
from chatlearn_generator_kit.replica import CLOSED, GeneratorReplica
from chatlearn_hf.checkpoint_names import expected_manifest
from chatlearn_hf.model_directory import check_model_directory, check_tokenizer_fits, load_config, load_tokenizer
from chatlearn_hf.model_directory import max_length as longest_of
from ctranslate2_generator.conversion import convert
from ctranslate2_generator.options import CTranslate2Options, engine_problems
from ctranslate2_generator.sampled_request import SampledRequest, as_array
from ctranslate2_generator.weight_loader import CTranslate2WeightLoader


class CTranslate2Generator(GeneratorReplica[SampledRequest]):
    """One replica. The engine samples; its callback, in a worker thread, notes every token and ends the call when the
    request is complete, aborted or paused. A paused request continues with its tokens as part of the prompt.
    """

    def __init__(self, options: CTranslate2Options, context: RoleContext) -> None:
        super().__init__("ctranslate2", context, SampledRequest)
        if problems := engine_problems(context.engine_arguments):
            raise ConfigError(refused(context.role, "ctranslate2.Generator", problems))
        self._options = options
        self._running: dict[SampledRequest, asyncio.Task[None]] = {}
        self._waiting: list[SampledRequest] = []
        """Requests that a pause interrupted."""
        self._offloaded: set[MemoryPart] = set()
        self._engine: Any = None
        self._folder: Path | None = None
        """Holds the engine's files of the served version."""
        self._loader: CTranslate2WeightLoader | None = None

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._require_model()
        directory = check_model_directory(source.path)
        if directory is None:
            raise BackendError(f"{self.name} reads local model directories only; download {source.path} first")
        config: Any = load_config(source.path, trust_remote_code=source.trust_remote_code)
        self._tokenizer: Any = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        check_tokenizer_fits(self._tokenizer, config, source.path)
        self._ends = _ends_of_sequence(directory, config, self._tokenizer)
        self._workers = ThreadPoolExecutor(self._options.num_workers, thread_name_prefix=f"{self._context.role}-ct2")
        self._loader = CTranslate2WeightLoader(self, expected_manifest(source.path), directory)
        ctranslate2.set_random_seed(self._context.seed + self._context.replica)
        self.serve_directory(directory)
        lengths = [length for length in (source.max_length, longest_of(config)) if length is not None]
        self._start_serving(min(lengths, default=2**31), int(config.vocab_size))

    def serve_directory(self, directory: Path) -> None:
        """Convert a Hugging Face directory and sample from it; blocks."""
        folder = Path(tempfile.mkdtemp(prefix="chatlearn-ctranslate2-"))
        try:
            self._tokens = convert(directory, folder)
            kind = self._options.compute_type
            if kind == "auto":
                kind = "float32" if self._context.device == "cpu" else "bfloat16"
            self._engine = None  # frees the old weights before the new ones are read
            self._engine = ctranslate2.Generator(
                str(folder),
                device=self._context.device.partition(":")[0],
                compute_type=kind,
                inter_threads=self._options.num_workers,
                intra_threads=self._options.threads_per_worker,
                **self._context.engine_arguments,
            )
        except BaseException:
            shutil.rmtree(folder)
            raise
        old, self._folder = self._folder, folder
        if old is not None:
            shutil.rmtree(old)

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Raises: BackendError: requests are being sampled."""
        if not set(parts) & {"weights", "kv_cache"}:
            return
        if self.is_generating or self._running:
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._offloaded |= set(parts) & {"weights", "kv_cache"}
        if "weights" in parts:
            self._engine.unload_model()

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. The KV cache lives as long as a call of the engine, so there is none to restore."""
        if "weights" in parts and "weights" in self._offloaded:
            self._engine.load_model()
        self._offloaded -= set(parts)

    def close(self) -> None:
        """See ``Lifecycle``."""
        self._set_dead(CLOSED)
        for pending in self._running:
            pending.interrupted = True
        if self._folder is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
            self._engine = None
            shutil.rmtree(self._folder)
            self._folder = None

    # Generator

    @property
    def loader(self) -> CTranslate2WeightLoader:
        """See ``Generator``."""
        assert self._loader is not None, "setup has not run"
        return self._loader

    def _submit_inbox(self) -> None:
        for pending in self._take_inbox():
            self._start(pending)

    def _drop(self, pending: SampledRequest) -> None:
        pending.interrupted = True
        if pending in self._waiting:
            self._waiting.remove(pending)

    async def _abort(self, pending: Sequence[SampledRequest]) -> None:
        for one in pending:
            one.interrupted = True
            if one in self._waiting:
                self._waiting.remove(one)
                self._answer(one, "abort")

    async def _pause(self) -> None:
        for pending in self._running:
            pending.interrupted = True
        if self._running:
            await asyncio.wait(self._running.values())

    async def _resume(self) -> None:
        waiting, self._waiting = self._waiting, []
        for pending in waiting:
            self._start(pending)
        self._submit_inbox()

    def _memory_problem(self) -> str | None:
        away = sorted(self._offloaded)
        return f"has {away[0]!r} offloaded; onload it before generating" if away else None

    @property
    def weights_are_offloaded(self) -> bool:
        """For the weight loader."""
        return "weights" in self._offloaded

    async def stop_serving(self) -> None:
        """See ``LoadingReplica``: requests that are being sampled wait until the new weights serve."""
        await super().stop_serving()
        await self._pause()

    async def serve(self, policy_version: int) -> None:
        """See ``LoadingReplica``."""
        await super().serve(policy_version)
        if not self._paused:
            await self._resume()

    # Inside

    def _start(self, pending: SampledRequest) -> None:
        pending.interrupted = False
        self._running[pending] = asyncio.get_running_loop().create_task(self._run(pending))

    async def _run(self, pending: SampledRequest) -> None:
        """Sample until the request is complete or interrupted."""
        loop = asyncio.get_running_loop()
        try:
            reason = await loop.run_in_executor(self._workers, self._sample, pending, loop, self._version)
        except Exception as error:
            failure = BackendError(f"{self.name}: request {pending.request.id!r} failed: {error}")
            failure.__cause__ = error
            pending.fail(failure)
            return
        finally:
            del self._running[pending]
        if reason is None and pending.is_aborted:
            reason = "abort"
        if reason is not None:
            self._answer(pending, reason)
        elif not pending.future.done():
            self._waiting.append(pending)

    def _sample(self, pending: SampledRequest, loop: asyncio.AbstractEventLoop, version: int) -> str | None:
        """In a worker thread: one call of the engine. Returns why the request is complete; None if interrupted."""
        reason: str | None = None
        needs_logits = pending.basis != RAW_BASIS

        def on_token(step: Any) -> bool:
            nonlocal reason
            pending.decide(step.token_id, as_array(step.logits) if needs_logits else None, step.log_prob, version)
            reason = pending.reason(self._ends, self._tokenizer.decode)
            if pending.on_tokens is not None:
                start = pending.num_prior + len(pending.token_ids) - 1
                loop.call_soon_threadsafe(pending.report, self.name, start, [step.token_id])
            return reason is not None or pending.interrupted

        if pending.interrupted:
            return None
        sampling = pending.request.sampling
        is_greedy = sampling.temperature == 0.0
        ids = [*pending.context().tolist(), *pending.token_ids]
        self._engine.generate_batch(
            [[self._tokens[token] for token in ids]],
            max_length=pending.max_new_tokens - len(pending.token_ids),
            include_prompt_in_result=False,
            sampling_temperature=1.0 if is_greedy else sampling.temperature,
            sampling_topk=1 if is_greedy else sampling.top_k,
            sampling_topp=1.0 if is_greedy else sampling.top_p,
            end_token=[],  # the callback ends the call
            return_scores=True,
            return_logits_vocab=needs_logits,
            callback=on_token,
        )
        return reason

    def _answer(self, pending: SampledRequest, reason: str) -> None:
        problem = pending.problem(reason)
        if problem is not None:
            pending.fail(BackendError(f"{self.name}: request {pending.request.id!r} failed: {problem}"))
            return
        pending.finish(pending.whole_with_raw(reason, self._tokenizer.decode(pending.all_token_ids())))


def _ends_of_sequence(directory: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end a completion: generation_config.json's, config.json's and the tokenizer's."""
    from transformers import GenerationConfig

    named = [config.eos_token_id, tokenizer.eos_token_id]
    if (directory / "generation_config.json").exists():
        named.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    ids: set[int] = set()
    for value in named:
        ids.update([] if value is None else value if isinstance(value, list) else [value])
    return frozenset(ids)
