"""What the engine is started with: the configuration's arguments, and those that the adapter owns."""

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
"""What the arguments are passed to."""

OWNED: Mapping[str, str] = {
    "base_gpu_id": "set roles.<role>.device",
    "context_length": "set model.max_length",
    "custom_weight_loader": "this backend loads weights itself",
    "device": "set roles.<role>.device",
    "dtype": "set options.dtype",
    "enable_custom_logit_processor": "this backend applies top-k and top-p by it",
    "enable_lora": "set options.lora",
    "enable_lora_overlap_loading": "this backend loads adapters itself",
    "lora_paths": "adapters come from weight syncs; set options.lora",
    "lora_strict_loading": "this backend checks adapters",
    "lora_target_modules": "all linear layers that SGLang serves adapters for; set options.lora",
    "max_loaded_loras": "one adapter is served; set options.lora",
    "max_lora_rank": "set options.lora.max_rank",
    "max_loras_per_batch": "one adapter is served; set options.lora",
    "model_path": "set model.path",
    "random_seed": "every request carries its seed",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "tokenizer_path": "set model.tokenizer",
    "trust_remote_code": "set model.trust_remote_code",
    "weight_version": "policy versions come from weight syncs",
}
"""Arguments that the adapter sets itself, and what to set instead."""

CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Seeded sampling is compiled by SGLang; on a CPU that needs a C++ compiler and a minute.
    "TORCH_COMPILE_DISABLE": "1",
}
ENVIRONMENT: Mapping[str, str] = {
    # The adapter checks lengths itself, and asks for one token more than SGLang lets a model's configuration allow.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ADAPTER_VARIABLE = "CHATLEARN_SGLANG_ADAPTER"
"""Tells the engine's processes that they serve an adapter: ``engine_side.adapter.VARIABLE``."""
SPARE_CONTEXT_TOKENS = 8
"""SGLang ends a sequence a little before its context is full; sequences of the model's whole length are allowed."""


CPU_REFUSED: Mapping[str, str] = {
    "attn_dp_size": "its attention for CPUs cannot pad the batches of ranks to one size",
    "ep_size": "its experts for CPUs look for all of them on every rank; tp_size splits experts by their width",
}
"""Arguments above 1 at which SGLang 0.5.23 without its compiled CPU kernels crashes, and why."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """See ``GeneratorSpec.check_engine``: those that this backend owns. Names are checked where the engine is."""
    return owned_problems(arguments, OWNED)


def check_arguments(role: str, arguments: Mapping[str, Any], *, cpu: bool) -> None:
    """Refuse arguments that the adapter sets, and engines that cannot run or whose weights cannot be changed.

    Raises:
        ConfigError: names them all, with what to set instead.
    """
    lines = [f"{name}: {problem}" for name, problem in engine_problems(arguments).items()]
    if arguments.get("dp_size", 1) != 1 and not arguments.get("enable_dp_attention"):
        lines.append(
            f"dp_size: {arguments['dp_size']!r}; SGLang 0.5.23 updates the weights of one data-parallel rank only; set"
            f" roles.{role}.replicas, or attn_dp_size for attention alone"
        )
    if cpu:
        lines += [
            f"{name}: {arguments[name]!r}; on a CPU SGLang 0.5.23 crashes of it: {why}"
            for name, why in CPU_REFUSED.items()
            if arguments.get(name, 1) != 1
        ]
    if lines:
        raise ConfigError(refused(role, TARGET, lines))


def check_architecture(config: Any, role: str) -> None:
    """Refuse what SGLang 0.5.23 from PyPI computes wrongly on a CPU, without an error.

    Raises:
        ConfigError: the model has multi-head latent attention (DeepSeek-V2, -V3 and their kin).
    """
    if getattr(config.get_text_config(), "kv_lora_rank", None):
        raise ConfigError(
            f"roles.{role}: SGLang 0.5.23 without its compiled CPU kernels gives other logits than transformers for"
            f" models with multi-head latent attention, such as this one ({config.model_type}); set"
            f" roles.{role}.device to a GPU, or choose another generator for it"
        )


def interpreter(options: SGLangGeneratorOptions, role: str) -> str:
    """Which Python runs the engine.

    Raises:
        ConfigError: none is named and this one has no SGLang.
    """
    if options.python is not None:
        return shutil.which(options.python) or options.python
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"roles.{role}.options.python is not set and SGLang is not installed in {sys.executable}. SGLang's pins"
            " rarely agree with a trainer's: install it into an environment of its own and set 'python' to that"
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
    """What the adapter sets; ``lora_targets``: endings of the layers that LoRA adapters may change."""
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
            "max_loras_per_batch": 2,  # the adapter, and the base model, which SGLang counts as one
        }
    return owned


def environment(options: SGLangGeneratorOptions, arguments: Mapping[str, Any], *, cpu: bool) -> dict[str, str | None]:
    """Variables of the engine's processes, the configuration's last."""
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
    """Which cores each tensor-parallel rank may use, as SGLang reads it: ``0,1|2,3``. Without it it asks for NUMA
    nodes, of which there are rarely enough. With fewer cores than ranks they share.
    """
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(ranks))
