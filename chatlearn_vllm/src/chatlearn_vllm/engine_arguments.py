"""Arguments for vLLM's ``EngineArgs``: this backend's defaults and the checked ``engine`` settings of the
configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols.lifecycle import RoleContext
from chatlearn_generator_kit.engine_arguments import owned_problems, refused
from chatlearn_vllm.options import VLLMGeneratorOptions

OWNED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "data_parallel_address",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_rank",
            "data_parallel_rpc_port",
            "data_parallel_size_local",
            "data_parallel_start_rank",
        ),
        "this backend starts the ranks itself, all on one node; set only data_parallel_size",
    ),
    "disable_log_stats": "this backend collects its own statistics",
    "enable_lora": "set options.lora",
    "logprobs_mode": "set options.logprobs",
    "max_lora_rank": "set options.lora.max_rank",
    "max_logprobs": "this backend sets it: a run asks for as many logprobs as it keeps ids",
    "max_loras": "the engine serves one adapter; set options.lora",
    "model": "set model.path",
    "runner": "set options.runner",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "tokenizer": "set model.tokenizer",
    "trust_remote_code": "set model.trust_remote_code",
    "weight_transfer_config": "this backend sets it; choose a transport under weight_sync",
    "worker_extension_cls": "this backend sets it",
}
"""Arguments that this backend sets itself, each with the setting to use instead."""

TARGET = "vllm.EngineArgs"
"""Name of the class that takes the arguments."""

RANK_VARIABLES = (
    "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
    "VLLM_DP_RANK",
    "VLLM_DP_RANK_LOCAL",
    "VLLM_DP_SIZE",
)
"""Environment variables that would make vLLM start an engine as one rank of several."""

CPU_KV_CACHE_BYTES = 4 << 30
"""KV cache size on a CPU. By default vLLM would take nearly all of the machine's memory, which a trainer may need too.
"""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Report arguments that this backend sets itself (``GeneratorSpec.check_engine``). vLLM checks the names."""
    return owned_problems(arguments, OWNED)


def engine_arguments(options: VLLMGeneratorOptions, context: RoleContext) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs``. The engine's interpreter, which has vLLM, checks their names.

    Raises:
        ConfigError: an argument is set by this backend, or requests something that is unsupported here.
        BackendError: the role has no model.
    """
    source = context.model
    if source is None:
        raise BackendError(
            f"role {context.role!r} (vllm) has no model; set model.path or roles.{context.role}.model.path"
        )
    problems = [f"{name}: {problem}" for name, problem in engine_problems(context.engine_arguments).items()]
    if options.dtype != "auto" and context.engine_arguments.get("dtype", options.dtype) != options.dtype:
        problems.append(
            f"dtype: {context.engine_arguments['dtype']!r}, and options.dtype is {options.dtype!r}; remove one of them"
        )
    on_cpu = not context.device.startswith("cuda")
    if on_cpu and context.engine_arguments.get("enable_expert_parallel"):
        problems.append(
            "enable_expert_parallel: on a CPU vLLM 0.32 reads past the experts of a worker and crashes; remove it:"
            " tensor_parallel_size splits the width of each expert instead"
        )
    problems += _data_parallel_problems(source.path, context.engine_arguments)
    if problems:
        raise ConfigError(refused(context.role, TARGET, problems))
    ours: dict[str, Any] = {
        "model": source.path,
        "tokenizer": source.tokenizer_path,
        "trust_remote_code": source.trust_remote_code,
        "logprobs_mode": f"{options.logprobs}_logprobs",
        "max_logprobs": -1,
        "seed": context.seed,
    }
    if options.lora is not None:
        ours |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": options.lora.max_rank}
    if options.classifies:
        ours["runner"] = "pooling"
    defaults: dict[str, Any] = {
        "dtype": options.dtype if options.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    }
    if source.max_length is not None:
        defaults["max_model_len"] = source.max_length
    if num_workers(context.engine_arguments) > 1:
        # Inside a Ray worker vLLM would ask Ray for resources, which the runtime has already allocated.
        defaults["distributed_executor_backend"] = "mp"
    if not on_cpu:
        defaults["enable_sleep_mode"] = True
    else:
        defaults["enforce_eager"] = True
        if "gpu_memory_utilization" not in context.engine_arguments:
            defaults["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    arguments = defaults | context.engine_arguments | ours
    arguments.pop("data_parallel_size", None)  # DataParallelHost gives it to each rank
    return arguments


def data_parallel_size(engine: Mapping[str, Any]) -> int:
    """Number of data-parallel ranks; they share the engine's experts, and each has its own requests."""
    return int(engine.get("data_parallel_size", 1))


def num_workers(engine: Mapping[str, Any]) -> int:
    """Number of worker processes that these engine arguments need, over all data-parallel ranks."""
    per_rank = int(engine.get("tensor_parallel_size", 1)) * int(engine.get("pipeline_parallel_size", 1))
    return data_parallel_size(engine) * per_rank


def _data_parallel_problems(model: str, engine: Mapping[str, Any]) -> list[str]:
    """Return the problems that prevent this number of data-parallel ranks here."""
    size = engine.get("data_parallel_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        return [f"data_parallel_size: {size!r} is not a whole number, 1 or more"]
    problems = []
    found = [name for name in RANK_VARIABLES if name in os.environ]
    if found:
        problems.append(
            f"data_parallel_size: {', '.join(found)} in the environment would make this engine a rank of another one;"
            " unset them, and set data_parallel_size"
        )
    backend = engine.get("distributed_executor_backend", "mp")
    if size > 1 and backend != "mp":
        problems.append(
            f"distributed_executor_backend: {backend!r}, and data_parallel_size is {size}: the workers of its ranks are"
            " processes on one node; remove it"
        )
    if size > 1 and _is_dense(model):
        problems.append(
            f"data_parallel_size: {size} ranks would share the experts of {model}, but that has none, and vLLM refuses"
            f" dense models; multiply roles.<role>.replicas by {size} instead"
        )
    return problems


def _is_dense(model: str) -> bool:
    """Whether the model's configuration certainly names no experts. False if there is no file to read; vLLM then
    checks.
    """
    try:
        text = (Path(model) / "config.json").read_text(encoding="utf-8")
    except OSError:
        return False
    return not _names_experts(json.loads(text))


def _names_experts(value: Any) -> bool:
    if isinstance(value, dict):
        return any("expert" in name or _names_experts(inner) for name, inner in value.items())
    return isinstance(value, list) and any(map(_names_experts, value))
