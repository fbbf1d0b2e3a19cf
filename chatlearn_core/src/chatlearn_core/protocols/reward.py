"""The reward: judges finished samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from chatlearn_core.protocols.lifecycle import Lifecycle
from chatlearn_core.types import RewardResult, Sample

RewardUnit = Literal["sample", "group"]


@runtime_checkable
class Reward(Lifecycle, Protocol):
    """Scores samples, one by one or a group at a time (``unit`` in the plugin record)."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result a sample, in order.

        A sample that cannot be judged gets a result with ``error``; it is counted and excluded. Exceptions, NaN and a
        wrong number of results are caught by the caller and mark every sample of the call the same way.
        """
