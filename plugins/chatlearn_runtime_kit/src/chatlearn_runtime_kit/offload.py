"""Moving a backend's parts, and measuring what came of it."""

from __future__ import annotations

from collections.abc import Collection

from chatlearn_core.protocols import MEMORY_PARTS, Lifecycle, MeasuresMemory, MemoryAction, MemoryEvent, MemoryPart


def move(
    backend: Lifecycle, action: MemoryAction, parts: Collection[MemoryPart], *, role: str, worker: int
) -> list[MemoryEvent]:
    """Offload or onload ``parts`` of a backend; blocks.

    The events are made when the backend is done, from what it measures then: a backend that only says that it moved a
    part is found out.

    Args:
        worker: rank of a trainer, replica of a generator.
    """
    (backend.offload if action == "offload" else backend.onload)(parts)
    moved = [part for part in MEMORY_PARTS if part in parts]
    if not isinstance(backend, MeasuresMemory):
        return [MemoryEvent(role, worker, action, part, None) for part in moved]
    return [MemoryEvent(role, worker, action, part, backend.live_bytes(part)) for part in moved]
