"""The reward: scores finished samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from chatlearn_core.protocols.lifecycle import Lifecycle
from chatlearn_core.types import RewardResult, Sample

RewardUnit = Literal["sample", "group"]


@runtime_checkable
class Reward(Lifecycle, Protocol):
    """Scores samples one by one or in whole groups (``unit`` in the plugin record)."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order.

        A sample that cannot be scored gets a result with ``error``; it is counted and excluded. The caller catches
        exceptions, NaN and a wrong number of results, and marks every sample of the call the same way.

        Called: when samples are finished (unit ``sample``) or their group is (unit ``group``); on an event loop of
        each worker of the reward; once per batch of samples.

        Raises:
            RoleLostError: no sample can be scored, whatever it contains (a server refuses the key, say). It ends the
                run; every other exception only excludes samples.
        """
