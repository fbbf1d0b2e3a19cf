"""The GPUs that the ends of a sync use, determined without touching a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(device: str, count: int = 1) -> list[str]:
    """Return the host's names of the GPUs that ``count`` ranks use, the first of which is on ``device``.

    ``cuda:0`` names different GPUs in two processes with different CUDA_VISIBLE_DEVICES. Empty for other devices.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return []
    first = int(index or 0)
    seen = [entry.strip() for entry in os.environ.get(VISIBLE, "").split(",") if entry.strip()]
    return (seen or [str(number) for number in range(first + count)])[first : first + count]


def shared_gpu(ends: Iterable[tuple[str, Iterable[str]]]) -> str | None:
    """A GPU used by two of these ends, as text; None if there is none.

    Args:
        ends: host and GPUs of each.
    """
    taken: set[tuple[str, str]] = set()
    for host, gpus in ends:
        mine = {(host, gpu) for gpu in gpus}
        if twice := sorted(mine & taken):
            return f"GPU {twice[0][1]} of host {host}"
        taken |= mine
    return None
