"""Checks the engine arguments that are passed unchanged to ``from_pretrained``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import ConfigError
from chatlearn_hf.engine_arguments import argument_problems, refused

OWNED: Mapping[str, str] = {
    "attn_implementation": "set options.attention",
    "device_map": "the runtime places the role; set roles.<role>.device",
    "dtype": "set options.dtype",
    "max_memory": "the runtime places the role; set roles.<role>.device",
    "offload_folder": "the executor offloads and onloads roles",
    "output_loading_info": "this backend sets it",
    "quantization_config": "weight syncs need unquantised weights; use a generator backend that quantises",
    "torch_dtype": "set options.dtype",
    "tp_plan": "this backend runs on one device; use a generator backend with tensor parallelism",
    "trust_remote_code": "set model.trust_remote_code",
}
"""Arguments that this backend sets itself, each with the setting to use instead."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """See ``GeneratorSpec.check_engine``."""
    return argument_problems(arguments, OWNED)


def check_engine_arguments(role: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Check the engine arguments and return them.

    Raises:
        ConfigError: names every argument that is unknown, has a wrong type or is set by this backend, with the remedy.
    """
    problems = engine_problems(arguments)
    if problems:
        raise ConfigError(refused(role, "the generator 'transformers'", problems))
    return dict(arguments)
