"""The generator ``sglang``: an adapter for one hosted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from chatlearn_core.exceptions import BackendError, ConfigError, HostedCallError
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_generator_kit.engine_arguments import refused
from chatlearn_generator_kit.pending_request import EngineRequest
from chatlearn_generator_kit.replica import CLOSED, GeneratorReplica
from chatlearn_hf.checkpoint_names import expected_manifest
from chatlearn_hf.model_directory import check_tokenizer_fits, load_config, load_tokenizer, max_length
from chatlearn_hosting import HostedProcess
from chatlearn_sglang.engine_arguments import (
    TARGET,
    check_architecture,
    check_arguments,
    environment,
    interpreter,
    owned_arguments,
)
from chatlearn_sglang.options import SGLangGeneratorOptions
from chatlearn_sglang.served_adapter import AdapterTerms, target_modules
from chatlearn_sglang.weight_loader import SGLangWeightLoader

_PACKAGE = "chatlearn_sglang.engine_side"
_MOVE_TIMEOUT_S = 600.0
"""Longest time in seconds to release, restore or measure memory."""
_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")
"""Memory parts of this backend, in the order in which they are restored."""


@dataclass(slots=True, eq=False)
class SGLangRequest(EngineRequest):
    """A request with the tokens that ``on_tokens`` has not received yet."""

    unreported: list[int] = field(default_factory=list)
    """Tokens that arrived while paused: the engine sampled them before the pause, its detokeniser returned them after
    it."""
    num_reported: int = 0

    @property
    def rid(self) -> str:
        """The request's name in the engine. All names have one length, because SGLang aborts by prefix."""
        return f"{self.number:020d}"

    def sampling(self) -> dict[str, Any]:
        """Return plain sampling parameters for the remaining tokens."""
        sampling = self.request.sampling
        longest = max(map(len, sampling.stop), default=0)
        return {
            "max_tokens": self.max_new_tokens,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "max_kept_ids": sampling.max_kept_ids,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": int(sampling.seed),
            "text_before": self.prior.text[1 - longest :] if self.prior is not None and longest > 1 else "",
        }

    def report_all(self, generator: str) -> bool:
        """Report the unreported tokens to ``on_tokens``. Returns whether the request continues."""
        tokens, self.unreported = self.unreported, []
        start = self.num_prior + self.num_reported
        self.num_reported += len(tokens)
        return self.report(generator, start, tokens)


class SGLangGenerator(GeneratorReplica[SGLangRequest]):
    """One replica: one engine in its own process group, on one or several devices.

    Requests go to the engine in submission order.
    """

    keeps_ids = True

    def __init__(self, options: SGLangGeneratorOptions, context: RoleContext) -> None:
        """Check the engine arguments. Raises: ConfigError: an argument is refused, or no interpreter has SGLang."""
        super().__init__("sglang", context, SGLangRequest)
        check_arguments(context.role, context.engine_arguments, cpu=context.device == "cpu")
        self._options = options
        self._python = interpreter(options, context.role)
        self._process: HostedProcess | None = None
        self._loader: SGLangWeightLoader | None = None
        self._calls: set[asyncio.Task[None]] = set()
        """Running calls of the engine: one for each of its requests, and those that abort requests."""
        self._offloaded: set[MemoryPart] = set()
        self._keeps_memory = False
        """Whether the engine was started without a memory saver, so that it cannot release memory."""

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._require_model()
        config: Any = load_config(source.path, trust_remote_code=source.trust_remote_code)
        tokenizer = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        check_tokenizer_fits(tokenizer, config, source.path)
        lengths = [n for n in (source.max_length, max_length(config)) if n is not None]
        model_length = min(lengths, default=2**31)
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
                f"roles.{self._context.role}.options.lora: this backend serves adapters for none of the layers of"
                f" {source.path}; remove options.lora and set weight_sync.payload to full"
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
                    model_length=model_length,
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
                raise ConfigError(refused(self._context.role, TARGET, error.text.splitlines())) from error
            raise
        self._keeps_memory = bool(facts["keeps_memory"])
        loader = SGLangWeightLoader(
            self,
            self._process,
            expected,
            sync_dtype=self._options.sync_dtype,
            bucket_bytes=self._options.bucket_mb << 20,
            facts=facts,
            adapters=None if lora is None else AdapterTerms(targets, lora.max_rank),
        )
        directory = Path(source.path).expanduser()
        if directory.is_dir():
            loader.load_tied(directory, self._options.start_timeout_s)
        self._loader = loader
        self._start_serving(model_length, int(config.get_text_config().vocab_size))

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Sequences kept by a pause recompute their KV cache when they continue.

        Raises:
            BackendError: sequences are running and not paused, or the engine was started without its memory saver.
        """
        wanted = [part for part in _PARTS if part in parts and part not in self._offloaded]
        if not wanted:
            return
        if self._keeps_memory:
            raise BackendError(
                f"{self.name} cannot be offloaded: engine.enable_memory_saver is false; remove it, or set"
                " memory.offload to never and give the role its own devices"
            )
        if self.is_generating:
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
        """See ``MeasuresMemory``. Returns the sum over the engine's schedulers.

        Raises:
            BackendError: the engine does not answer.
        """
        if part not in _PARTS or self._process is None or self._process.lost is not None:
            return 0
        return int(self._process.call("live_bytes", part, timeout_s=_MOVE_TIMEOUT_S))

    def close(self) -> None:
        """See ``Lifecycle``. Pending requests fail with a ``BackendError``."""
        self._set_dead(CLOSED)
        if self._process is not None:
            self._process.close()

    def _find_loss(self) -> str | None:
        return None if self._process is None else self._process.lost

    # Generator

    @property
    def loader(self) -> SGLangWeightLoader:
        """See ``Generator``."""
        assert self._loader is not None, "setup has not run"
        return self._loader

    def _submit_inbox(self) -> None:
        for pending in self._take_inbox():
            self._spawn(self._run_request(pending))

    def _drop(self, pending: SGLangRequest) -> None:
        async def end() -> None:
            with suppress(BackendError):  # the request is gone with its engine
                await self._call("abort", [pending.rid])

        self._spawn(end())

    async def _abort(self, pending: Sequence[SGLangRequest]) -> None:
        await asyncio.sleep(0)  # first send the requests submitted in this event-loop iteration
        await self._call("abort", [one.rid for one in pending])

    async def _pause(self) -> None:
        await asyncio.sleep(0)  # as above
        await self._call("pause")

    async def _resume(self) -> None:
        if self._state == "serving":
            await self._call("resume")
        for pending in list(self._pending.values()):
            if pending.unreported:
                pending.report_all(self.name)
        self._submit_inbox()

    def _memory_problem(self) -> str | None:
        away = [part for part in _PARTS if part in self._offloaded]
        return f"has {away[0]!r} offloaded; onload it before generating" if away else None

    # Replica, for the weight loader

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the engine has released the memory of its weights."""
        return "weights" in self._offloaded

    @property
    def stays_paused(self) -> bool:
        """Whether the replica is paused and stays so after a sync."""
        return self._paused

    async def die(self, reason: str, cause: BaseException | None = None) -> None:
        """See ``LoadingReplica``. Also ends the engine's processes."""
        await super().die(reason, cause)
        if self._process is not None:
            await asyncio.to_thread(self._process.close, 0)

    # Inside

    async def _run_request(self, pending: SGLangRequest) -> None:
        """Let the engine sample, check its output, and complete the pending call."""
        assert self._process is not None
        try:
            reply = await self._process.acall(
                "generate",
                pending.rid,
                pending.context().tolist(),
                pending.sampling(),
                on_event=None if pending.on_tokens is None else lambda tokens: self._on_event(pending, tokens),
            )
            if pending.report_all(self.name):
                self._answer(pending, reply)
        except BackendError as error:
            self._notice_loss()  # fails all pending requests
            reason = error.text if isinstance(error, HostedCallError) else str(error)
            self._fail(pending, reason, error)
        except Exception as error:
            self._fail(pending, f"{type(error).__name__}: {error}", error)

    def _answer(self, pending: SGLangRequest, reply: Mapping[str, Any]) -> None:
        finish = reply["finish"]
        pending.take(
            reply["token_ids"],
            reply["logprobs"],
            ((start, version) for start, _, version in reply["spans"]),
        )
        pending.note_cached(reply["num_cached_tokens"])
        problem = pending.problem(finish.get("type"), finish.get("message", "no reason given"))
        if pending.request.sampling.max_kept_ids and len(reply["kept"]) != len(reply["token_ids"]):
            problem = problem or "the engine did not return the ids that every token was sampled from"
        for ids in reply["kept"]:
            problem = problem or pending.keep_ids(np.array(ids, dtype=np.int32))
        if problem is not None:
            self._fail(pending, problem)
            return
        before = "" if pending.prior is None else pending.prior.text
        pending.finish(pending.whole(finish["type"], before + reply["text"]))

    def _fail(self, pending: SGLangRequest, reason: str, cause: BaseException | None = None) -> None:
        failure = BackendError(f"{self.name}: request {pending.request.id!r} failed: {reason}")
        failure.__cause__ = cause
        pending.fail(failure)

    def _on_event(self, pending: SGLangRequest, tokens: list[int]) -> None:
        pending.unreported.extend(tokens)
        if not self._paused:
            pending.report_all(self.name)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.get_running_loop().create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, method: str, *arguments: Any) -> Any:
        assert self._process is not None, "setup has not run"
        return await self._process.acall(method, *arguments)

    def _move(self, method: str, parts: list[MemoryPart]) -> None:
        assert self._process is not None, "setup has not run"
        try:
            self._process.call(method, list(parts), timeout_s=_MOVE_TIMEOUT_S)
        except BackendError as error:
            # Part of the memory may have moved, so further samples could not be trusted.
            self._set_dead(f"{method} of {', '.join(parts)} failed: {error}", error)
            self._process.close(grace_s=0)
            raise


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
