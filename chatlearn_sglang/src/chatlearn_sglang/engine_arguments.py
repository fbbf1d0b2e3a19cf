"""The arguments that start the engine: those of the configuration, and those that this backend sets itself."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols.lifecycle import RoleContext
from chatlearn_generator_kit.engine_arguments import owned_problems, refused
from chatlearn_sglang.options import SGLangGeneratorOptions

DISTRIBUTION = "sglang"
TARGET = "sglang.Engine"
"""Name of the class that takes the arguments."""

OWNED: Mapping[str, str] = {
    "base_gpu_id": "set roles.<role>.device",
    "context_length": "set model.max_length",
    "custom_weight_loader": "this backend loads weights itself",
    "device": "set roles.<role>.device",
    "dtype": "set options.dtype",
    "enable_custom_logit_processor": "this backend applies top-k and top-p by it",
    "enable_lora": "set options.lora",
    "enable_lora_overlap_loading": "this backend loads adapters",
    "lora_paths": "adapters come from weight syncs; set options.lora",
    "lora_strict_loading": "this backend checks adapters",
    "lora_target_modules": "this backend targets all linear layers that SGLang supports; set options.lora",
    "max_loaded_loras": "the engine serves one adapter; set options.lora",
    "max_lora_rank": "set options.lora.max_rank",
    "max_loras_per_batch": "the engine serves one adapter; set options.lora",
    "model_path": "set model.path",
    "random_seed": "every request carries its seed",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "tokenizer_path": "set model.tokenizer",
    "trust_remote_code": "set model.trust_remote_code",
    "weight_version": "policy versions come from weight syncs",
}
"""Arguments that this backend sets itself, each with the setting to use instead."""

CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Seeded sampling is compiled by SGLang; on a CPU that needs a C++ compiler and a minute.
    "TORCH_COMPILE_DISABLE": "1",
}
ENVIRONMENT: Mapping[str, str] = {
    # The adapter checks lengths itself, and requests a context longer than the model's configuration states.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ADAPTER_VARIABLE = "CHATLEARN_SGLANG_ADAPTER"
"""Tells the engine's processes that they serve a LoRA adapter; equals ``engine_side.adapter.VARIABLE``."""
SPARE_CONTEXT_TOKENS = 8
"""Added to the context length, because SGLang ends a sequence slightly before its context is full."""


CPU_REFUSED: Mapping[str, str] = {
    "attn_dp_size": "its CPU attention cannot pad the batches of the ranks to one size",
    "ep_size": "its CPU experts need all experts on every rank; tp_size splits the width of each expert instead",
}
"""Arguments for which any value above 1 crashes SGLang 0.5.23 without its compiled CPU kernels, with the reason."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Report arguments that this backend sets itself (``GeneratorSpec.check_engine``). SGLang checks the names."""
    return owned_problems(arguments, OWNED)


def check_arguments(role: str, arguments: Mapping[str, Any], *, cpu: bool) -> None:
    """Refuse arguments that this backend sets, engines that cannot run, and engines whose weights cannot be updated.

    Raises:
        ConfigError: names all such arguments, with what to set instead.
    """
    lines = [f"{name}: {problem}" for name, problem in engine_problems(arguments).items()]
    if arguments.get("dp_size", 1) != 1 and not arguments.get("enable_dp_attention"):
        lines.append(
            f"dp_size: {arguments['dp_size']!r}; SGLang 0.5.23 updates the weights of only one data-parallel rank; set"
            f" roles.{role}.replicas, or attn_dp_size for data-parallel attention"
        )
    if cpu:
        lines += [
            f"{name}: {arguments[name]!r}; on a CPU SGLang 0.5.23 crashes with it: {why}"
            for name, why in CPU_REFUSED.items()
            if arguments.get(name, 1) != 1
        ]
    if lines:
        raise ConfigError(refused(role, TARGET, lines))


def check_architecture(config: Any, role: str) -> None:
    """Refuse models that SGLang 0.5.23 from PyPI silently computes wrongly on a CPU.

    Raises:
        ConfigError: the model has multi-head latent attention (DeepSeek-V2, -V3 and related models).
    """
    if getattr(config.get_text_config(), "kv_lora_rank", None):
        raise ConfigError(
            f"roles.{role}: SGLang 0.5.23 without its compiled CPU kernels computes different logits than"
            " transformers for"
            f" models with multi-head latent attention, such as this one ({config.model_type}); set"
            f" roles.{role}.device to a GPU, or choose another generator"
        )


def interpreter(options: SGLangGeneratorOptions, role: str) -> str:
    """Return the path of the Python interpreter that runs the engine.

    Raises:
        ConfigError: no interpreter is set, and this one has no SGLang.
    """
    if options.python is not None:
        return shutil.which(options.python) or options.python
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"roles.{role}.options.python is not set and SGLang is not installed in {sys.executable}. SGLang's pinned"
            " dependencies rarely agree with a trainer's: install it into its own environment and set 'python' to that"
            " environment's bin/python"
        ) from None
    return sys.executable


def owned_arguments(
    context: RoleContext,
    options: SGLangGeneratorOptions,
    *,
    dtype: str,
    model_length: int,
    lora_targets: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the arguments that this backend sets. ``lora_targets`` has the layer name endings that adapters may
    change.
    """
    source = context.model
    assert source is not None
    device, _, index = context.device.partition(":")
    owned: dict[str, Any] = {
        "model_path": source.path,
        "tokenizer_path": source.tokenizer_path,
        "trust_remote_code": source.trust_remote_code,
        "dtype": dtype,
        "device": device,
        "context_length": model_length + SPARE_CONTEXT_TOKENS,
        "random_seed": context.seed,
        "weight_version": "0",
    }
    if index:
        owned["base_gpu_id"] = int(index)
    if options.lora is not None:
        owned |= {
            "enable_lora": True,
            "lora_strict_loading": True,
            "lora_target_modules": list(lora_targets),
            "max_lora_rank": options.lora.max_rank,
            "max_loras_per_batch": 2,  # the adapter and the base model, which SGLang counts as an adapter
        }
    return owned


def environment(options: SGLangGeneratorOptions, arguments: Mapping[str, Any], *, cpu: bool) -> dict[str, str | None]:
    """Return the environment variables of the engine's processes; those of the configuration take precedence."""
    variables: dict[str, str | None] = dict(ENVIRONMENT)
    if options.lora is not None:
        variables[ADAPTER_VARIABLE] = "1"
    if cpu:
        variables |= CPU_ENVIRONMENT
        ranks = int(arguments.get("tp_size", 1))
        if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = core_shares(sorted(os.sched_getaffinity(0)), ranks)
    return variables | options.environment


def core_shares(cores: list[int], ranks: int) -> str:
    """Assign cores to the tensor-parallel ranks in SGLang's format: ``core_shares([0, 1, 2, 3], 2)`` is ``0,1|2,3``.

    Without it, SGLang assigns NUMA nodes, of which there are rarely enough. With fewer cores than ranks, ranks share
    cores.
    """
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))
