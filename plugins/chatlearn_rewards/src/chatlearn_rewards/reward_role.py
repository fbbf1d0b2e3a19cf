"""What the rewards of this distribution have in common: their life, and errors that name their sample."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from chatlearn_core.protocols import MemoryPart
from chatlearn_core.types import RewardResult, Sample


class RewardRole:
    """Implements ``chatlearn_core.protocols.Reward`` around ``_score``. A subclass that holds something overrides
    ``setup`` and ``close`` and calls these.
    """

    _is_open = False

    def setup(self) -> None:
        """Nothing to start."""
        self._is_open = True

    def health(self) -> str | None:
        """Whether it was set up and not closed: what else can fail is another role or a server."""
        return None if self._is_open else "it was not set up, or was closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing of its own is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing of its own is on a device."""

    def close(self) -> None:
        """Nothing to release."""
        self._is_open = False

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result per sample, in order; an error begins with the id of its sample, unless it has it."""
        results = await self._score(samples)
        return [_named(sample, result) for sample, result in zip(samples, results, strict=True)]

    async def _score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order."""
        raise NotImplementedError


def _named(sample: Sample, result: RewardResult) -> RewardResult:
    if result.error is None or sample.id in result.error:
        return result
    return replace(result, error=f"sample {sample.id!r}: {result.error}")
