"""What the engine is started with: the configuration's arguments, and those that the adapter owns."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols.lifecycle import RoleContext
from chatlearn_sglang.options import SGLangGeneratorOptions

DISTRIBUTION = "sglang"

OWNED: Mapping[str, str] = {
    "base_gpu_id": "set roles.<role>.device",
    "context_length": "set model.max_length",
    "custom_weight_loader": "this backend loads weights itself",
    "device": "set roles.<role>.device",
    "dtype": "set options.dtype",
    "enable_custom_logit_processor": "this backend applies top-k and top-p by it",
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
SPARE_CONTEXT_TOKENS = 8
"""SGLang ends a sequence a little before its context is full; sequences of the model's whole length are allowed."""


def check_owned(role: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the adapter sets.

    Raises:
        ConfigError: names them all, with what to set instead.
    """
    lines = [f"{name}: owned by the backend; {OWNED[name]}" for name in arguments if name in OWNED]
    if lines:
        raise ConfigError(refused(role, lines))


def refused(role: str, lines: list[str]) -> str:
    """The message about engine arguments that cannot be passed on."""
    return f"roles.{role}.engine holds arguments that cannot be passed to sglang.Engine:\n" + "\n".join(
        f"  {line}" for line in lines
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
    context: RoleContext, options: SGLangGeneratorOptions, *, dtype: str, model_length: int
) -> dict[str, Any]:
    """What the adapter sets."""
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
    return owned


def environment(options: SGLangGeneratorOptions, arguments: Mapping[str, Any], *, cpu: bool) -> dict[str, str | None]:
    """Variables of the engine's processes, the configuration's last."""
    variables: dict[str, str | None] = dict(ENVIRONMENT)
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
