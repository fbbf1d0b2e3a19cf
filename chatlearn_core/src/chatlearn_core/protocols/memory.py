"""Memory that roles share: the devices they occupy, and the memory in use after a part is offloaded or onloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from chatlearn_core.protocols.lifecycle import MemoryPart

MemoryAction = Literal["offload", "onload"]


@dataclass(slots=True, frozen=True, order=True)
class Device:
    """A piece of memory that parts of roles occupy. Roles with a device in common share it."""

    place: str
    """For example ``cuda:0``, ``node-1, GPU 3`` or ``pool 'gpus', slot 0``; unique within a run."""
    is_gpu: bool
    """Whether the memory belongs to an accelerator."""


@dataclass(slots=True, frozen=True)
class MemoryEvent:
    """Record of one part of one worker after a move, made by the worker that hosts the backend."""

    role: str
    worker: int
    """Rank of a trainer or index of a generator replica."""
    action: MemoryAction
    part: MemoryPart
    live_bytes: int | None
    """Bytes that the part occupies on the device after the move, measured; None if the backend cannot measure it."""


@runtime_checkable
class MeasuresMemory(Protocol):
    """A trainer or generator that can measure its parts. Without it, moves are not verified."""

    def live_bytes(self, part: MemoryPart) -> int:
        """Bytes that a part occupies on the device now, summed over the storages that hold it rather than inferred from
        a flag: 0 for an offloaded part and for a part that the backend does not hold.

        Called: after each move; in the process that hosts the backend; once per part that was moved.
        """
