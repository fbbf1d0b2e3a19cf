"""Which GPUs the process of an engine sees."""

from __future__ import annotations

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(device: str, num_workers: int, inherited: str | None) -> str | None:
    """The value of ``CUDA_VISIBLE_DEVICES`` for an engine in a process of its own; None leaves it as it is.

    A role on ``cuda:N`` has the ``num_workers`` GPUs from N on, of those that this process sees; vLLM takes the first
    of what its process sees. On ``cuda`` and ``cpu`` nothing is hidden.

    Args:
        device: the role's.
        num_workers: the engine's, a GPU each.
        inherited: value in this process; None if it is not set.

    Raises:
        ValueError: this process does not see so many; the message holds the numbers.
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
            f"GPUs {wanted[0]} to {wanted[-1]} are needed, and {VARIABLE}={inherited!r} shows {len(seen)}"
            if num_workers > 1
            else f"GPU {first} is needed, and {VARIABLE}={inherited!r} shows {len(seen)}"
        )
    return ",".join(seen[index] for index in wanted)
