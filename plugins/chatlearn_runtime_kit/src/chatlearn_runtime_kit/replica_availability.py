"""Tracks which replicas of a fleet accept requests, and waits for changes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

Absence = Literal["loads weights", "is rebuilt", "waits for the next version"]


class ReplicaAvailability:
    """Records which replicas are absent, and why; a replica can be both loading weights and being rebuilt."""

    def __init__(self, num_replicas: int) -> None:
        self._absences: list[list[Absence]] = [[] for _ in range(num_replicas)]
        self._num_absences = [0] * num_replicas
        self._accepting = frozenset(range(num_replicas))
        self._changed = asyncio.Event()

    @property
    def accepting(self) -> frozenset[int]:
        """Replicas that accept requests; the same object until the set changes."""
        return self._accepting

    def num_absences(self, replica: int) -> int:
        """Number of times the replica has become absent."""
        return self._num_absences[replica]

    def is_rebuilding(self) -> bool:
        """Whether any replica is being rebuilt."""
        return any("is rebuilt" in absences for absences in self._absences)

    @contextmanager
    def absent(self, replicas: Collection[int], why: Absence) -> Iterator[None]:
        """During the block these replicas accept no requests."""
        self.leave(replicas, why)
        try:
            yield
        finally:
            self.come_back(replicas, why)

    def leave(self, replicas: Collection[int], why: Absence) -> None:
        """These replicas accept no requests until they come back."""
        for replica in replicas:
            self._absences[replica].append(why)
            self._num_absences[replica] += 1
        self._tell()

    def come_back(self, replicas: Collection[int], why: Absence) -> None:
        """This reason for which these replicas left is gone."""
        for replica in replicas:
            self._absences[replica].remove(why)
        self._tell()

    async def changed(self) -> None:
        """Wait until a replica becomes absent or returns."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._accepting = frozenset(index for index, absences in enumerate(self._absences) if not absences)
        self._changed.set()
        self._changed = asyncio.Event()

    def __str__(self) -> str:
        """The absent replicas and the reasons, for messages."""
        return ", ".join(
            f"replica {index} {' and '.join(absences)}" for index, absences in enumerate(self._absences) if absences
        )
