"""Offloads and onloads a backend's parts, and measures the result."""

from __future__ import annotations

from collections.abc import Collection

from chatlearn_core.protocols import MEMORY_PARTS, Lifecycle, MeasuresMemory, MemoryAction, MemoryEvent, MemoryPart


def move(
    backend: Lifecycle, action: MemoryAction, parts: Collection[MemoryPart], *, role: str, worker: int
) -> list[MemoryEvent]:
    """Offload or onload ``parts`` of a backend; blocks.

    The events report what the backend measures after the move, which exposes a backend that reports success without
    moving a part.

    Args:
        worker: rank of a trainer or index of a generator replica.
    """
    (backend.offload if action == "offload" else backend.onload)(parts)
    moved = [part for part in MEMORY_PARTS if part in parts]
    if not isinstance(backend, MeasuresMemory):
        return [MemoryEvent(role, worker, action, part, None) for part in moved]
    return [MemoryEvent(role, worker, action, part, backend.live_bytes(part)) for part in moved]
