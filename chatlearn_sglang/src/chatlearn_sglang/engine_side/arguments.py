"""Engine arguments: the user's, over those that the device asks for, under those that the adapter depends on."""

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
    # Otherwise a scheduler without work spins, on a core that the trainer could use.
    "sleep_on_idle": True,
}
"""What SGLang 0.5.23 needs to run on a CPU without kernels of its own; all of it may be overridden."""


def compose(user: Mapping[str, Any], owned: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    device = CPU_ARGUMENTS if cpu else {}
    # Sampling by torch takes a seed a request; SGLang's default on GPUs, flashinfer, takes none.
    common: dict[str, Any] = {"sampling_backend": "pytorch", "log_level": "error", "skip_server_warmup": True}
    if not cpu and user.get("enable_memory_saver", True):
        # Without a copy on the host, weights that were released come back as garbage.
        common |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
    return {**common, **device, **user, **owned}
