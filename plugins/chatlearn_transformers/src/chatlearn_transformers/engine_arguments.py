"""Engine-native arguments: what a configuration hands to ``from_pretrained`` verbatim, checked first."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from chatlearn_core.exceptions import ConfigError

PASSED: frozenset[str] = frozenset(
    {
        "cache_dir",
        "experts_implementation",
        "key_mapping",
        "local_files_only",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "use_safetensors",
        "variant",
    }
)
"""Arguments of ``PreTrainedModel.from_pretrained`` that change where weights come from or which kernels run."""

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


def check_engine_arguments(role: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments to pass on.

    Raises:
        ConfigError: names every argument that is unknown or owned by this backend, with what to do.
    """
    problems: list[str] = []
    for name in arguments:
        if name in OWNED:
            problems.append(f"{name}: owned by the backend; {OWNED[name]}")
        elif name not in PASSED:
            near = difflib.get_close_matches(name, sorted(PASSED | OWNED.keys()), n=1)
            problems.append(f"{name}: unknown" + (f"; did you mean {near[0]!r}?" if near else ""))
    if problems:
        raise ConfigError(
            f"roles.{role}.engine holds arguments that the generator 'transformers' does not pass to from_pretrained:\n"
            + "\n".join(f"  {line}" for line in problems)
            + f"\n  it passes: {', '.join(sorted(PASSED))}"
        )
    return dict(arguments)
