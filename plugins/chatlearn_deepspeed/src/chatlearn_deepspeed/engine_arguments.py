"""DeepSpeed's own configuration: ``roles.<name>.engine`` and ``options.config_file``, checked and merged.

Imports nothing heavy, so that configurations are checked without torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chatlearn_core.exceptions import ConfigError

AUTO = "auto"
"""Value that transformers' trainer fills in; here the owner of the key does."""

OWNED: Mapping[str, str] = {
    "amp": "set options.param_dtype",
    "bf16": "set options.param_dtype",
    "checkpoint": "the run sets where and when checkpoints are written",
    "communication_data_type": "gradients are reduced in float32",
    "compile": "this trainer runs the model as it is",
    "data_types": "set options.param_dtype; gradients are added in float32",
    "elasticity": "set roles.<role>.ranks",
    "fp16": "set options.param_dtype; float16 with loss scaling is not supported",
    "gradient_accumulation_steps": "set options.max_tokens_per_micro_batch",
    "gradient_allreduce_op": "gradients are summed over ranks",
    "gradient_clipping": "set options.grad_clip",
    "gradient_predivide_factor": "gradients are summed over ranks",
    "managed_gradient_accumulation": "set options.max_tokens_per_micro_batch",
    "optimizer": "set options.optimizer, options.learning_rate and the options beside them",
    "prescale_gradients": "gradients are summed over ranks",
    "scheduler": "set options.schedule and options.warmup_steps",
    "tensor_parallel": "this trainer shards with ZeRO and Ulysses only",
    "torch_autocast": "set options.param_dtype",
    "train_batch_size": "set the algorithm's batch sizes",
    "train_micro_batch_size_per_gpu": "set options.max_tokens_per_micro_batch",
    "zero_optimization.offload_optimizer": "set options.offload_optimizer",
    "zero_optimization.offload_param": "set options.offload_params",
    "zero_optimization.stage": "set options.zero_stage",
}
"""Keys that this backend sets itself, each with the setting to use instead."""

PASSED = (
    "activation_checkpointing",
    "aio",
    "comms_logger",
    "csv_monitor",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "seq_parallel_communication_data_type",
    "sparse_gradients",
    "steps_per_print",
    "tensorboard",
    "timers",
    "use_data_before_expert_parallelism",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
"""Keys of DeepSpeed's configuration that are passed on; DeepSpeed ignores unknown ones silently."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """See ``TrainerSpec.check_engine``: each key that cannot be passed on, with the reason and the remedy."""
    problems: dict[str, str] = {}
    for name, value in arguments.items():
        if name in OWNED:
            problems[name] = f"owned by the backend; {OWNED[name]}"
        elif name not in PASSED:
            near = difflib.get_close_matches(name, [*PASSED, *OWNED], n=1)
            problems[name] = "unknown to DeepSpeed 0.19" + (f"; did you mean {near[0]!r}?" if near else "")
        elif name == "zero_optimization":
            if not isinstance(value, Mapping):
                problems[name] = f"must be a mapping, but is {value!r}"
                continue
            owned = (f"{name}.{key}" for key in value if f"{name}.{key}" in OWNED)
            problems |= {key: f"owned by the backend; {OWNED[key]}" for key in owned}
    return problems


def check_engine_arguments(role: str, arguments: Mapping[str, Any]) -> None:
    """Refuse a configuration that cannot be passed on.

    Raises:
        ConfigError: names every key that is unknown or set by this backend, with the remedy.
    """
    _check(f"roles.{role}.engine", arguments)


def native_configuration(role: str, config_file: str | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the JSON file with ``roles.<role>.engine``, which takes precedence in every section.

    Args:
        role: for messages.
        config_file: the JSON file, if any. Owned keys with the value ``auto`` are left to their owner.
        arguments: content of ``roles.<role>.engine``.

    Raises:
        ConfigError: the file cannot be read, or a key cannot be passed on.
    """
    check_engine_arguments(role, arguments)
    if config_file is None:
        return _merged({}, arguments)
    try:
        content = json.loads(Path(config_file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"roles.{role}.options.config_file: cannot read {config_file}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"roles.{role}.options.config_file: {config_file} must hold a JSON object")
    content = _without_auto(content)
    _check(f"{config_file} (roles.{role}.options.config_file)", content)
    return _merged(content, arguments)


def _check(where: str, arguments: Mapping[str, Any]) -> None:
    problems = engine_problems(arguments)
    if problems:
        raise ConfigError(
            f"{where} holds settings that the trainer 'deepspeed' does not pass to DeepSpeed:\n"
            + "\n".join(f"  {name}: {problem}" for name, problem in problems.items())
            + f"\n  it passes: {', '.join(PASSED)}"
        )


def _without_auto(content: Mapping[str, Any]) -> dict[str, Any]:
    """Drop values ``auto``, and sections in which nothing else is left."""
    kept: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            inner = _without_auto(value)
            if inner or not value:
                kept[name] = inner
        elif value != AUTO:
            kept[name] = value
    return kept


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of nested mappings; ``second`` takes precedence."""
    both = dict(first)
    for name, value in second.items():
        old = both.get(name)
        both[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both
