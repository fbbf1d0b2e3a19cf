"""vLLM's engine core, driven step by step in this process.

This replaces the output side of vLLM's synchronous engine: token ids and logprobs come from the engine core as arrays,
and text is decoded only for requests with stop strings. Supported versions: ``versions.SUPPORTED``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from chatlearn_hosting.engine_side.argument_names import UnknownArgumentsError
from chatlearn_hosting.engine_side.local_groups import gloo_on_loopback, keep_local_stores_local

from .arguments import engine_args
from .process_groups import discard_stale_groups
from .process_state import EngineLogHandler, engine_log, imports_quietly, preserved, set_environment, threads_bound
from .scored_prompts import TEMPERATURE
from .seeded_draws import EXTRA_ARGUMENT
from .versions import check_version
from .weight_transfer_name import BACKEND, WORKER_EXTENSION

Report = tuple[int, list[int], list[float], str | None, int | None, list[list[int]] | None]
"""(request key, new token ids, their logprobs, finish reason or None, number of cached prompt tokens or None, for each
new token the ids it was sampled from or None if the request does not ask for them). A request that classifies has no
tokens, and its score takes the place of a logprob.

Example: ``(7, [318, 262], [-0.21, -1.4], None, None, None)``, two new tokens of an unfinished request."""

ADAPTER_ID = 1
"""Id of the only LoRA adapter; a new version replaces it in place."""

_WARM_UP = ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 2, "top_p": 0.9})
"""Sampling parameters of the warm-up requests. vLLM compiles parts of its sampling on first use."""

REQUIRED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Runs the engine core in the driver's thread. Workers of a parallel engine still have their own processes."""
DEFAULT_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Variables that are set unless the user has set them. vLLM's logs go through ``EngineLogHandler``, and vLLM sends no
usage statistics. Workers share a host, so they communicate over loopback; they are spawned, because forking a process
with threads is unsafe."""


class StartError(RuntimeError):
    """The engine did not start. The message ends with vLLM's last log lines."""


class Engine:
    """One engine. All calls must come from one thread."""

    def __init__(self, arguments: Mapping[str, Any], *, log_level: str, num_threads: int | None) -> None:
        """Start the engine and warm it up.

        Args:
            arguments: arguments of ``vllm.EngineArgs``.
            log_level: lowest level of vLLM log messages to forward.
            num_threads: number of torch CPU threads for the calling thread; None leaves it unchanged.

        Raises:
            UnknownArgumentsError: the installed vLLM has no such argument.
            StartError: the engine does not start.
        """
        set_environment(REQUIRED_ENVIRONMENT, DEFAULT_ENVIRONMENT)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        log = engine_log(log_level)
        self._keys: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._watchers: dict[int, Any] = {}
        self._num_kept: dict[int, int] = {}
        self._forced: dict[int, list[int]] = {}
        """Key -> the given tokens of a request that scores them."""
        self._adapter: Any = None
        with preserved():
            self._start(arguments, log)
            try:
                self._scores_at_any_temperature = all(self.call_workers("chatlearn_prepare", log_level))
                self._warm_up()
            except Exception as error:
                self.close()
                raise _start_error(error, log) from error

    def _start(self, arguments: Mapping[str, Any], log: EngineLogHandler) -> None:
        with imports_quietly():
            import vllm
            from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
            from vllm.v1.engine.llm_engine import LLMEngine

        check_version(vllm.__version__)
        try:
            args = engine_args(
                {
                    "worker_extension_cls": WORKER_EXTENSION,
                    "weight_transfer_config": {"backend": BACKEND},
                    "disable_log_stats": True,
                    "use_tqdm_on_load": False,
                    **arguments,
                }
            )
            num_workers = vllm.envs.VLLM_DP_SIZE * args.tensor_parallel_size * args.pipeline_parallel_size
            discard_stale_groups()
            _ROPE_DICT.clear()  # another engine's sleep would free shared rotary tables
            keep_local_stores_local()
            with threads_bound(num_workers), gloo_on_loopback():
                self._engine: Any = LLMEngine.from_engine_args(args)
        except UnknownArgumentsError:
            raise
        except Exception as error:
            raise _start_error(error, log) from error
        self._client = self._engine.engine_core
        self._core = self._client.engine_core
        self._ranks: dist.ProcessGroup | None = self._engine.dp_group
        """Process group of the data-parallel ranks; None if the engine is not data-parallel."""
        # The finalizer would destroy the process groups that all engines of this process share.
        self._client._finalizer.detach()
        self._tasks = self._engine.get_supported_tasks()
        self._classifies = "classify" in self._tasks
        self._is_cpu = self._engine.vllm_config.device_config.device_type == "cpu"

    def _warm_up(self) -> None:
        if self._classifies:
            self._add_classification({"key": 0, "prompt_ids": [0]})
        for key, sampling in enumerate(() if self._classifies else _WARM_UP):
            self.add(
                {"key": key, "prompt_ids": [0], "prior_ids": [], "max_tokens": 2, "top_p": 1.0, "top_k": 0, "stop": []}
                | {"stop_token_ids": [], "ignore_eos": True, "seed": 0}
                | sampling
            )
        while self.has_work:
            self.step()
        self.reset_caches()

    def facts(self) -> dict[str, Any]:
        """Return what the adapter needs to know about the engine."""
        config = self._engine.vllm_config
        parallel = config.parallel_config
        return {
            "max_model_len": config.model_config.max_model_len,
            "vocab_size": config.model_config.get_vocab_size(),
            "num_labels": getattr(config.model_config.hf_config, "num_labels", 1),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "num_workers": parallel.world_size,
            "takes_adapters": config.lora_config is not None,
            "offload_problem": offload_problem(config, on_cpu=self._is_cpu),
        }

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._keys)

    def add(self, request: Mapping[str, Any]) -> None:
        """Add a request; ``chatlearn_vllm.generator._wire`` builds it.

        Raises:
            ValueError: vLLM refuses it.
        """
        from vllm import SamplingParams

        if request.get("classify"):
            self._add_classification(request)
            return
        if request.get("forced_ids"):
            self._add_score(request)
            return
        key, stop = int(request["key"]), list(request["stop"])
        max_kept_ids = int(request.get("max_kept_ids", 0))
        # One more than may be kept shows whether others are.
        num_kept = min(max_kept_ids + 1, self._engine.vllm_config.model_config.get_vocab_size())
        params = SamplingParams(
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
            max_tokens=request["max_tokens"],
            stop_token_ids=request["stop_token_ids"],
            ignore_eos=request["ignore_eos"],
            seed=request["seed"],
            logprobs=num_kept if max_kept_ids else 0,
            detokenize=False,
            extra_args={EXTRA_ARGUMENT: len(request["prior_ids"])},
        )
        prompt = {"type": "token", "prompt_token_ids": [*request["prompt_ids"], *request["prior_ids"]]}
        inner = self._engine.input_processor.process_inputs(
            str(key), prompt, params, supported_tasks=self._tasks, lora_request=self._adapter
        )
        self._engine.input_processor.assign_request_id(inner)
        watcher = self._watch(inner, request, stop) if stop else None
        self._client.add_request(inner)
        if watcher is not None:
            self._watchers[key] = watcher
        if max_kept_ids:
            self._num_kept[key] = 1 if request["temperature"] == 0.0 else num_kept
        self._keys[inner.request_id] = key
        self._ids[key] = inner.request_id

    def _add_score(self, request: Mapping[str, Any]) -> None:
        """Add a request that scores given tokens: to vLLM they are the end of a prompt whose logprobs it returns.

        Raises:
            ValueError: vLLM refuses it, or this model runner does not compute it.
        """
        from vllm import SamplingParams

        key, temperature = int(request["key"]), float(request["score_temperature"])
        if temperature != 1.0 and not self._scores_at_any_temperature:
            raise ValueError(
                f"this engine's model runner computes logprobs of given tokens at temperature 1, not {temperature:g}"
            )
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=0,
            detokenize=False,
            extra_args={TEMPERATURE: temperature},
        )
        prompt = {"type": "token", "prompt_token_ids": [*request["prompt_ids"], *request["forced_ids"]]}
        inner = self._engine.input_processor.process_inputs(
            str(key), prompt, params, supported_tasks=self._tasks, lora_request=self._adapter
        )
        self._engine.input_processor.assign_request_id(inner)
        self._client.add_request(inner)
        self._forced[key] = list(request["forced_ids"])
        self._keys[inner.request_id] = key
        self._ids[key] = inner.request_id

    def _add_classification(self, request: Mapping[str, Any]) -> None:
        """Add a request for the score of a prompt.

        Raises:
            ValueError: vLLM refuses it.
        """
        from vllm import PoolingParams

        key, prompt = int(request["key"]), {"type": "token", "prompt_token_ids": list(request["prompt_ids"])}
        params = PoolingParams(task="classify", use_activation=False)
        inner = self._engine.input_processor.process_inputs(str(key), prompt, params, supported_tasks=self._tasks)
        self._engine.input_processor.assign_request_id(inner)
        self._client.add_request(inner)
        self._keys[inner.request_id] = key
        self._ids[key] = inner.request_id

    def step(self) -> list[Report]:
        """Compute one step and return what it sampled.

        If a data-parallel rank has no batch, it takes part in the other ranks' step with a dummy batch.
        """
        reports, has_computed = self._advance()
        if self._ranks is not None and not has_computed:
            self._core.execute_dummy_batch()
        return reports

    def agree(self, num_received: int, *, busy: bool, closing: bool) -> tuple[int, bool, bool]:
        """Synchronise the state of all data-parallel ranks; waits until every rank has called.

        Args:
            num_received: number of commands this rank has received and not yet run.
            busy: whether this rank has work.
            closing: whether this rank is about to end.

        Returns: (number of commands that every rank has received, whether any rank is busy, whether any is closing).
        """
        assert self._ranks is not None, "the engine is not data-parallel"
        values = torch.tensor([num_received, -int(busy), -int(closing)], dtype=torch.int64, device="cpu")
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._ranks)
        num_received, idle, staying = values.tolist()
        return num_received, idle < 0, staying < 0

    def _advance(self) -> tuple[list[Report], bool]:
        """Let the engine core schedule and compute. Returns what it sampled, and whether the model ran."""
        reports: list[Report] = []
        stopped: list[str] = []
        outputs, has_computed = self._core.step_fn()
        self._core.post_step(model_executed=has_computed)
        ours = outputs.get(0) if outputs else None
        for output in () if ours is None else ours.outputs:
            key = self._keys.get(output.request_id)
            if key is None:
                continue  # the request was aborted during the step
            if output.pooling_output is not None:
                reports.append((key, [], [float(value) for value in output.pooling_output], "stop", None, None))
                self._forget(key)
                continue
            if key in self._forced:
                reports.append(self._score(key, output))
                self._forget(key)
                continue
            reason = None if output.finish_reason is None else str(output.finish_reason)
            watcher = self._watchers.get(key)
            if watcher is not None and watcher.update(output.new_token_ids, False) is not None:
                if reason is None:
                    stopped.append(output.request_id)
                reason = "stop"
            logprobs = [] if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
            cached = None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens
            kept = None
            if key in self._num_kept and output.new_logprobs is not None:
                kept = kept_ids(output.new_logprobs, self._num_kept[key])
            reports.append((key, output.new_token_ids, logprobs, reason, cached, kept))
            if reason is not None:
                self._forget(key)
        if stopped:
            self._client.abort_requests(stopped)
        return reports, has_computed

    def _score(self, key: int, output: Any) -> Report:
        """The report of a request that scores given tokens; the token that vLLM samples besides is dropped."""
        forced, logprobs = self._forced[key], output.new_prompt_logprobs_tensors
        found = [] if logprobs is None else logprobs.logprobs[-len(forced) :, 0].tolist()
        cached = None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens
        return key, forced, found, "stop", cached, None

    def drain(self) -> Iterator[list[Report]]:
        """Finish the steps that asynchronous scheduling has already started, without starting others."""
        if self._core.batch_queue is None:
            return
        self._core.pause_scheduler("keep", clear_cache=False)
        try:
            for _ in range(self._core.batch_queue_size):
                yield self._advance()[0]
        finally:
            self._core.resume_scheduler()

    def abort(self, keys: Sequence[int]) -> None:
        """Abort requests; unknown keys are ignored."""
        ids = [self._ids[key] for key in keys if key in self._ids]
        for key in keys:
            self._forget(key)
        self._client.abort_requests(ids)

    def reset_caches(self) -> None:
        """Clear all caches; unfinished requests recompute their context.

        Raises:
            RuntimeError: the engine did not clear a cache.
        """
        if not self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("the prefix cache could not be reset")
        self._client.reset_mm_cache()
        self._client.reset_encoder_cache()

    def call_workers(self, method: str, argument: Any = None) -> list[Any]:
        """Call a method of every worker, wait for all, and return their results."""
        results: list[Any] = self._engine.collective_rpc(method, args=() if argument is None else (argument,))
        return results

    def load_adapter(self, directory: str) -> None:
        """Load a LoRA adapter from a directory in peft's format; it replaces the previous one.

        Raises:
            ValueError: the adapter does not fit the engine's LoRA settings.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest("policy", ADAPTER_ID, directory, load_inplace=True)
        self._client.add_lora(request)
        self._adapter = LoRARequest("policy", ADAPTER_ID, directory)

    def sleep(self, level: int) -> None:
        """Release memory.

        Args:
            level: 0 drops the KV cache; 1 also moves the weights to host memory; 2 also drops the weights.
        """
        self.reset_caches()
        if self._is_cpu:
            self.call_workers("chatlearn_sleep", level)
        elif level == 0:
            self._core.model_executor.discard(("kv_cache",))
        else:
            self._core.model_executor.sleep(level)

    def wake(self, parts: list[str]) -> None:
        """Restore the memory of ``weights`` or ``kv_cache``."""
        if self._is_cpu:
            self.call_workers("chatlearn_wake", parts)
        else:
            self._core.model_executor.wake_up(parts)

    def live_bytes(self, part: str) -> int:
        """Bytes that ``weights`` or ``kv_cache`` occupy now, measured by the workers and summed."""
        return sum(self.call_workers("chatlearn_live_bytes", part))

    def close(self) -> None:
        """End the workers and free memory.

        Keeps the process groups that vLLM created for a single worker, because other engines of this process, or a
        trainer, may use them.
        """
        core = self._core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        self._engine = self._client = self._core = core = None
        gc.unfreeze()
        gc.collect()

    def _watch(self, inner: Any, request: Mapping[str, Any], stop: list[str]) -> Any:
        """Return vLLM's detokenizer, which finds stop strings, after feeding it the tokens of a resumed completion."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        watched = copy(inner)
        watched.prompt_token_ids = list(request["prompt_ids"])
        watched.sampling_params = copy(inner.sampling_params)
        watched.sampling_params.stop = stop
        watched.sampling_params.include_stop_str_in_output = True
        watched.sampling_params.skip_special_tokens = False
        watcher = IncrementalDetokenizer.from_new_request(self._engine.tokenizer, watched)
        watcher.update(list(request["prior_ids"]), False)
        return watcher

    def _forget(self, key: int) -> None:
        inner = self._ids.pop(key, None)
        if inner is not None:
            del self._keys[inner]
        self._watchers.pop(key, None)
        self._num_kept.pop(key, None)
        self._forced.pop(key, None)


def kept_ids(logprobs: Any, count: int) -> list[list[int]]:
    """For each new token the ids that it was sampled from, among the ``count`` most likely: those with a finite
    processed logprob.

    Args:
        logprobs: vLLM's ``LogprobsLists``; its first column is the sampled token, the others the most likely ones.
        count: number of ids to look at.
    """
    ids, values = logprobs.logprob_token_ids[:, 1 : count + 1], logprobs.logprobs[:, 1 : count + 1]
    return [row[np.isfinite(of_row)].tolist() for row, of_row in zip(ids, values, strict=True)]


def _start_error(error: Exception, log: EngineLogHandler) -> StartError:
    return StartError(f"{type(error).__name__}: {error}\nLast log lines of vLLM:\n{log.last()}")


def offload_problem(config: Any, *, on_cpu: bool) -> str | None:
    """Why an engine with this vLLM configuration cannot release memory; None if it can."""
    model = config.model_config
    if on_cpu:
        if config.quant_config is not None:
            return f"on a CPU quantised weights ({model.quantization}) are packed in ways that cannot be undone"
        if config.compilation_config.mode:
            return "on a CPU a compiled model keeps its packed weights; set engine.enforce_eager to true"
    elif not model.enable_sleep_mode:
        return "engine.enable_sleep_mode is false; remove it"
    elif model.sleep_mode_backend != "cumem":
        return f"engine.sleep_mode_backend is {model.sleep_mode_backend!r}, whose memory cannot be measured; remove it"
    return None
