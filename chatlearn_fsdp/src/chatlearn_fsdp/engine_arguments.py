"""Checks engine arguments: configuration fields of the model and arguments of ``from_pretrained``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_hf.engine_arguments import argument_problems, refused

OWNED: Mapping[str, str] = {
    "attn_implementation": "set options.attention",
    "config": "set single fields of the model's configuration instead",
    "device": "set roles.<role>.device",
    "device_map": "the runtime places the role; set roles.<role>.device",
    "dtype": "set options.master_dtype and options.param_dtype",
    "ignore_mismatched_sizes": "weights with a wrong shape are refused",
    "num_labels": "set roles.<role>.head",
    "output_loading_info": "this backend sets it",
    "quantization_config": "quantised weights cannot be trained",
    "torch_dtype": "set options.master_dtype and options.param_dtype",
    "tp_plan": "set roles.<role>.ranks, and options.tensor_parallel, options.dp_shard, options.ulysses or options.ring",
    "trust_remote_code": "set model.trust_remote_code",
}
"""Arguments that this backend sets itself, each with the setting to use instead."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """See ``TrainerSpec.check_engine``. Accepts names that may be fields of the model's configuration."""
    return argument_problems(arguments, OWNED, None)


def check_engine_arguments(role: str, arguments: Mapping[str, Any], fields: Collection[str] | None = None) -> None:
    """Refuse arguments that cannot be passed on.

    Args:
        role: for the message.
        arguments: content of ``roles.<role>.engine``.
        fields: fields of the model's configuration, if known.

    Raises:
        ConfigError: names every argument that is unknown, has a wrong type or is set by this backend, with the remedy.
    """
    problems = argument_problems(arguments, OWNED, fields)
    if problems:
        backend = "the trainer 'fsdp'"
        also = "" if fields is None else ", and fields of the model's configuration"
        raise ConfigError(refused(role, backend, problems) + also)
