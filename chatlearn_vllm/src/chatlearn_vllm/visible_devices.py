"""Selects the GPUs that an engine's process sees."""

from __future__ import annotations

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(device: str, num_workers: int, inherited: str | None) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES`` for an engine in its own process; None leaves it unchanged.

    A role on ``cuda:N`` gets ``num_workers`` GPUs from N on, of those that this process sees; vLLM uses the first GPUs
    that its process sees. For ``cuda`` and ``cpu`` nothing is hidden. Example: ``("cuda:1", 2, "4,5,6")`` gives
    ``"5,6"``.

    Args:
        device: the role's device.
        num_workers: number of engine workers, one GPU each.
        inherited: value of the variable in this process; None if unset.

    Raises:
        ValueError: this process sees too few GPUs; the message has the numbers.
    """
    if not device.startswith("cuda:"):
        return None
    first = int(device.removeprefix("cuda:"))
    wanted = range(first, first + num_workers)
    if inherited is None:
        return ",".join(map(str, wanted))
    seen = [entry.strip() for entry in inherited.split(",") if entry.strip()]
    if wanted[-1] >= len(seen):
        raise ValueError(
            f"GPUs {wanted[0]} to {wanted[-1]} are needed, but {VARIABLE}={inherited!r} shows only {len(seen)}"
            if num_workers > 1
            else f"GPU {first} is needed, but {VARIABLE}={inherited!r} shows only {len(seen)}"
        )
    return ",".join(seen[index] for index in wanted)
