"""Which replicas of a fleet take requests, and waiting for one that does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

Absence = Literal["loads weights", "is rebuilt"]


class ReplicaAvailability:
    """Keeps which replicas are absent, and why: one that is rebuilt also loads weights."""

    def __init__(self, num_replicas: int) -> None:
        self._absences: list[list[Absence]] = [[] for _ in range(num_replicas)]
        self._num_absences = [0] * num_replicas
        self._accepting = frozenset(range(num_replicas))
        self._changed = asyncio.Event()

    @property
    def accepting(self) -> frozenset[int]:
        """Replicas that take requests; the same object until that changes."""
        return self._accepting

    def num_absences(self, replica: int) -> int:
        """How often the replica has become absent."""
        return self._num_absences[replica]

    def is_rebuilding(self) -> bool:
        """Whether any replica is rebuilt just now."""
        return any("is rebuilt" in absences for absences in self._absences)

    @contextmanager
    def absent(self, replicas: Collection[int], why: Absence) -> Iterator[None]:
        """In the block these replicas take no requests."""
        for replica in replicas:
            self._absences[replica].append(why)
            self._num_absences[replica] += 1
        self._tell()
        try:
            yield
        finally:
            for replica in replicas:
                self._absences[replica].remove(why)
            self._tell()

    async def changed(self) -> None:
        """Wait until a replica becomes absent, or comes back."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._accepting = frozenset(index for index, absences in enumerate(self._absences) if not absences)
        self._changed.set()
        self._changed = asyncio.Event()

    def __str__(self) -> str:
        """Who is absent and why, for messages."""
        return ", ".join(
            f"replica {index} {' and '.join(absences)}" for index, absences in enumerate(self._absences) if absences
        )
