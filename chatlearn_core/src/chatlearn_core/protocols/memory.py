"""Memory that roles share: which devices they sit on, and what is known after a part was moved out or back in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from chatlearn_core.protocols.lifecycle import MemoryPart

MemoryAction = Literal["offload", "onload"]


@dataclass(slots=True, frozen=True, order=True)
class Device:
    """A piece of memory that parts of roles occupy. Roles that have a device in common share it."""

    place: str
    """Such as ``cuda:0``, ``node-1, GPU 3`` or ``pool 'gpus', slot 0``; unique within a run."""
    is_gpu: bool
    """Whether its memory is an accelerator's own."""


@dataclass(slots=True, frozen=True)
class MemoryEvent:
    """One part of one worker was moved; made after the effect, by the worker that hosts the backend."""

    role: str
    worker: int
    """Rank of a trainer, replica of a generator."""
    action: MemoryAction
    part: MemoryPart
    live_bytes: int | None
    """What the part occupies on the device afterwards, measured; None if the backend cannot measure it."""


@runtime_checkable
class MeasuresMemory(Protocol):
    """A trainer or generator that can measure its parts. Without it a move is taken on trust."""

    def live_bytes(self, part: MemoryPart) -> int:
        """Bytes that a part occupies on the device now, summed over the storages that hold it, not remembered from a
        flag: 0 for an offloaded part and for one that the backend does not hold.
        """
