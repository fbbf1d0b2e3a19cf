"""Composes engine arguments: defaults, overridden by the user's arguments, overridden by the backend's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "lora_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 32768,
    "max_running_requests": 64,
    # Otherwise an idle scheduler spins and occupies a core that the trainer could use.
    "sleep_on_idle": True,
}
"""Defaults with which SGLang 0.5.23 runs on a CPU without compiled kernels; the user may override all of them."""


def compose(user: Mapping[str, Any], owned: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``."""
    device = CPU_ARGUMENTS if cpu else {}
    # torch sampling supports a seed per request; flashinfer, SGLang's default on GPUs, does not.
    common: dict[str, Any] = {"sampling_backend": "pytorch", "log_level": "error", "skip_server_warmup": True}
    if not cpu and user.get("enable_memory_saver", True):
        # Without a copy on the host, released weights return as garbage.
        common |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return {**common, **device, **user, **owned}
