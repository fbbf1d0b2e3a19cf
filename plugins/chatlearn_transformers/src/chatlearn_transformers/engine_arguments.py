"""Engine-native arguments: what a configuration hands to ``from_pretrained`` verbatim, checked first."""

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
    "output_loading_info": "this backend reads it itself",
    "quantization_config": "weight syncs need unquantised weights; use a generator backend that quantises",
    "torch_dtype": "set options.dtype",
    "tp_plan": "this backend runs on one device; use a generator backend with tensor parallelism",
    "trust_remote_code": "set model.trust_remote_code",
}
"""Arguments that this backend sets itself, and what to set instead."""


def engine_problems(arguments: Mapping[str, Any]) -> dict[str, str]:
    """See ``GeneratorSpec.check_engine``."""
    return argument_problems(arguments, OWNED)


def check_engine_arguments(role: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to pass on.

    Raises:
        ConfigError: names every argument that is unknown, of a wrong type or owned by this backend, with what to do.
    """
    problems = engine_problems(arguments)
    if problems:
        raise ConfigError(refused(role, "the generator 'transformers'", problems))
    return dict(arguments)
