"""The generator ``vllm``: an asynchronous interface to one engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ConfigError, HostedCallError, ModelError
from chatlearn_core.protocols.lifecycle import MemoryPart, RoleContext
from chatlearn_core.types import RAW_BASIS, LogprobBasis, SamplingParams
from chatlearn_generator_kit.engine_arguments import refused
from chatlearn_generator_kit.pending_request import EngineRequest
from chatlearn_generator_kit.replica import CLOSED, GeneratorReplica
from chatlearn_hf.checkpoint_names import expected_manifest
from chatlearn_hf.model_directory import load_tokenizer
from chatlearn_vllm.data_parallel import DataParallelHost
from chatlearn_vllm.engine_arguments import TARGET, data_parallel_size, engine_arguments, num_workers
from chatlearn_vllm.engine_memory import EngineMemory
from chatlearn_vllm.engine_side.driver import Event
from chatlearn_vllm.hosts import ChildHost, EngineHost, InProcessHost
from chatlearn_vllm.options import VLLMGeneratorOptions
from chatlearn_vllm.visible_devices import VARIABLE, visible_devices
from chatlearn_vllm.weight_loader import VLLMWeightLoader

_CALL_TIMEOUT_S = 600.0
"""Longest time in seconds until the engine runs a command; the step before it may take seconds."""
_MOVE_TIMEOUT_S = 600.0
"""Longest time in seconds to release, restore or measure memory."""
_PARTS = frozenset({"weights", "kv_cache"})


class VLLMGenerator(GeneratorReplica[EngineRequest]):
    """One replica: one engine on one or several devices.

    Requests submitted in one event-loop iteration reach the engine together, in order; all tokens sampled in a step
    return together.
    """

    keeps_ids = True
    scores = True

    def __init__(self, options: VLLMGeneratorOptions, context: RoleContext) -> None:
        """Check the engine arguments. Raises: ConfigError: the backend sets an argument itself, or the device is
        unusable.
        """
        super().__init__("vllm", context, EngineRequest)
        self._options = options
        self.classifies = options.classifies
        self._arguments = engine_arguments(options, context)
        self._host: EngineHost | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory = EngineMemory(self._move, options.sleep_level)
        self._offload_problem: str | None = None
        """Why the engine cannot release memory; None if it can."""

    # Life cycle

    def setup(self) -> None:
        """See ``Lifecycle``."""
        source = self._require_model()
        self._tokenizer: Any = load_tokenizer(source.tokenizer_path, trust_remote_code=source.trust_remote_code)
        host = self._make_host()
        try:
            facts = host.start(
                self._arguments, log_level=self._options.log_level, num_threads=self._options.num_threads
            )
        except HostedCallError as error:
            host.close()
            if error.type_name == "UnknownArgumentsError":
                raise ConfigError(refused(self._context.role, TARGET, error.text.splitlines())) from error
            known = error.type_name == "StartError"  # its message has the cause and vLLM's last log lines
            reason = error.text if known else f"{error.type_name}: {error.text}"
            raise BackendError(f"{self.name}: the engine does not start: {reason}") from error
        except BaseException:
            host.close()
            raise
        if self.classifies and (labels := int(facts["num_labels"])) != 1:
            host.close()
            raise ModelError(
                f"{self.name}: {source.path} has {labels} labels (num_labels in its config.json), and a reward is one "
                "number; give the role a sequence classifier with one label"
            )
        self._host = host
        self._offload_problem = facts["offload_problem"]
        self._loader = VLLMWeightLoader(
            self,
            host,
            expected_manifest(source.path, getattr(torch, facts["dtype"])),
            num_workers=int(facts["num_workers"]),
            takes_adapters=bool(facts["takes_adapters"]),
            sync_dtype=self._options.sync_dtype,
            bucket_bytes=self._options.bucket_mb << 20,
        )
        self._start_serving(int(facts["max_model_len"]), int(facts["vocab_size"]))

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Requests kept by a pause recompute their context when they continue.

        The engine cannot release the weights without the KV cache.

        Raises:
            BackendError: requests are running and not paused, or this engine cannot release memory (the message says
                why).
        """
        wanted = set(parts) & _PARTS
        if not wanted:
            return
        if self._offload_problem is not None:
            raise BackendError(
                f"{self.name} cannot be offloaded: {self._offload_problem}; or set memory.offload to never, and give"
                " the role its own devices"
            )
        if self.is_generating:
            raise BackendError(f"{self.name} is generating; pause it before it is offloaded")
        self._memory.offload(wanted)

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """See ``Lifecycle``. Weights dropped by sleep level 2 return with the next sync."""
        self._memory.onload(parts)

    def live_bytes(self, part: MemoryPart) -> int:
        """See ``MeasuresMemory``. Returns the sum over the engine's workers.

        Raises:
            BackendError: the engine is gone or does not answer.
        """
        if self._host is None or self._problem == CLOSED or part not in _PARTS:
            return 0
        return int(self._move("live_bytes", part))

    def close(self) -> None:
        """See ``Lifecycle``. Pending requests fail with a ``BackendError``."""
        self._set_dead(CLOSED)
        if self._host is not None:
            self._host.close()

    def _find_loss(self) -> str | None:
        return None if self._host is None else self._host.lost

    # Generator

    @property
    def loader(self) -> VLLMWeightLoader:
        """See ``Generator``."""
        return self._loader

    def _basis(self, sampling: SamplingParams) -> LogprobBasis:
        return RAW_BASIS if self._options.logprobs == "raw" else sampling.basis

    def _submit_inbox(self) -> None:
        if len(self._inbox) == 1:
            self._listen().call_soon(self._flush)

    def _drop(self, pending: EngineRequest) -> None:
        self._require_host().drop([pending.number])

    async def _abort(self, pending: Sequence[EngineRequest]) -> None:
        await self._call("abort", [one.number for one in pending])
        self._answer([(one, "abort") for one in pending if not one.future.done()])

    async def _pause(self) -> None:
        self._listen()
        await self._call("pause")

    async def _resume(self) -> None:
        self._listen()
        self._flush()
        await self._call("resume")

    def _memory_problem(self) -> str | None:
        return self._memory.problem()

    # Replica, for the weight loader

    @property
    def weights_are_offloaded(self) -> bool:
        """Whether the engine has released the memory of its weights."""
        return "weights" in self._memory.asleep

    async def stop_serving(self) -> None:
        """See ``LoadingReplica``."""
        self._listen()
        self._flush()
        await super().stop_serving()

    async def serve(self, policy_version: int) -> None:
        """See ``LoadingReplica``."""
        await super().serve(policy_version)
        self._memory.weights_dropped = False

    # The engine

    def _make_host(self) -> EngineHost:
        options, device = self._options, self._context.device
        ranks = data_parallel_size(self._context.engine_arguments)
        if options.python is None and options.host == "process" and ranks == 1:
            if device not in ("cpu", "cuda", "cuda:0"):
                raise ConfigError(
                    f"roles.{self._context.role}.device is {device!r}: in the worker's own process vLLM uses the first"
                    f" visible GPU; set roles.{self._context.role}.options.host to child, which sees only its own GPUs"
                )
            return InProcessHost(self.name, options.start_timeout_s)
        workers = num_workers(self._context.engine_arguments)
        try:
            visible = visible_devices(device, workers, os.environ.get(VARIABLE))
        except ValueError as error:
            raise ConfigError(
                f"roles.{self._context.role}.device is {device!r}, and the engine has {workers} workers: {error}."
                " Choose"
                " another device, or lower engine.tensor_parallel_size, engine.pipeline_parallel_size or"
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
        """Receive events on the running loop; subscribes once per loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._require_host().listen(self._on_event)
        return loop

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call the driver. If the engine fails or times out, the replica is dead."""
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S) as limit:
                return await self._require_host().call(method, *arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            reason = f"its engine did not run {method!r} within {_CALL_TIMEOUT_S:g} s"
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

    def _flush(self) -> None:
        """Submit the requests collected in this event-loop iteration."""
        requests = [_wire(pending) for pending in self._take_inbox()]
        if requests and self._state != "dead":
            self._require_host().submit(requests)

    def _on_event(self, event: Event) -> None:
        kind, first, second = event
        if kind == "tokens":
            self._take(first, second)
        elif kind == "refused":
            pending = self._pending.get(first)
            if pending is not None:
                pending.fail(BackendError(f"{self.name}: the engine refused request {pending.request.id!r}: {second}"))
        else:
            self._set_dead(f"the engine died: {first}")

    def _take(
        self,
        version: int,
        reports: Iterable[tuple[int, list[int], list[float], str | None, int | None, list[list[int]] | None]],
    ) -> None:
        """Distribute the tokens of one step to their requests."""
        ended: list[tuple[EngineRequest, str]] = []
        for number, token_ids, logprobs, reason, num_cached, kept in reports:
            pending = self._pending.get(number)
            if pending is None or pending.future.done():
                continue
            if pending.request.classify:
                [score] = logprobs
                pending.finish(pending.classified(score))
                continue
            for ids in kept or ():
                problem = pending.keep_ids(np.array(ids, dtype=np.int32))
                if problem is not None:
                    pending.fail(BackendError(f"{self.name}: request {pending.request.id!r} failed: {problem}"))
                    break
            if pending.future.done():
                continue
            start = pending.num_prior + len(pending.token_ids)
            pending.take(token_ids, logprobs, [(0, version)])
            if num_cached is not None and not pending.num_cached_tokens:
                pending.note_cached(num_cached)
            if pending.report(self.name, start, token_ids) and reason is not None:
                ended.append((pending, reason))
        self._answer(ended)

    def _answer(self, ended: list[tuple[EngineRequest, str]]) -> None:
        """Give each pending call its completion, or the error."""
        whole = []
        for pending, reason in ended:
            problem = pending.problem(reason)
            if problem is None:
                whole.append((pending, reason))
            else:
                pending.fail(BackendError(f"{self.name}: request {pending.request.id!r} failed: {problem}"))
        if not whole:
            return
        try:
            texts: list[str] = self._tokenizer.batch_decode(
                [pending.all_token_ids() for pending, _ in whole],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        except Exception as error:  # raising in this event-loop callback would leave the pending calls waiting
            for pending, _ in whole:
                failure = BackendError(
                    f"{self.name}: the tokens of request {pending.request.id!r} cannot be decoded: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                pending.fail(failure)
            return
        for (pending, reason), text in zip(whole, texts, strict=True):
            pending.finish(pending.whole(reason, text))


def _wire(pending: EngineRequest) -> dict[str, Any]:
    """Return the request for the engine in plain builtins; see ``Engine.add``."""
    request, sampling, prior = pending.request, pending.request.sampling, pending.prior
    return {
        "key": pending.number,
        "prompt_ids": request.prompt_ids.tolist(),
        "prior_ids": [] if prior is None else prior.token_ids.tolist(),
        "max_tokens": pending.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_kept_ids": sampling.max_kept_ids,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed % 2**63,
        "forced_ids": [] if request.forced_ids is None else request.forced_ids.tolist(),
        "score_temperature": pending.basis.temperature,
        "classify": request.classify,
    }
