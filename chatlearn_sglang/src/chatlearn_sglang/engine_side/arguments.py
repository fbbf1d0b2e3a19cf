"""Engine arguments: the user's, over those that the device asks for, under those that the adapter depends on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

CPU_ARGUMENTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 32768,
    "max_running_requests": 64,
    # Otherwise a scheduler without work spins, on a core that the trainer could use.
    "sleep_on_idle": True,
}
"""What SGLang 0.5.23 needs to run on a CPU without kernels of its own; all of it may be overridden."""


class EngineArgumentError(ValueError):
    """Names that the installed engine does not take, one line each."""


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Every name is one of ``known``.

    Raises:
        EngineArgumentError: lists every unknown name with the nearest known one.
    """
    choices = sorted(known)
    lines = []
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=1)
            lines.append(f"{name}: unknown" + (f"; did you mean {near[0]!r}?" if near else ""))
    if lines:
        raise EngineArgumentError("\n".join(lines))


def compose(user: Mapping[str, Any], owned: Mapping[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    device = CPU_ARGUMENTS if cpu else {}
    # Sampling by torch takes a seed a request; SGLang's default on GPUs, flashinfer, takes none.
    common = {"sampling_backend": "pytorch", "log_level": "error", "skip_server_warmup": True}
    if user.get("enable_memory_saver"):
        # Without a copy on the host, weights that were released come back as garbage.
        common["enable_weights_cpu_backup"] = True
    return {**common, **device, **user, **owned}
