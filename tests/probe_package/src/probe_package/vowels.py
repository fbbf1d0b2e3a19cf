"""A reward that needs no answer."""

from collections.abc import Collection, Sequence

from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.types import RewardResult, Sample
from probe_package.options import NoOptions


class Vowels:
    """The share of vowels among what the policy wrote."""

    def __init__(self, options: NoOptions, context: RoleContext) -> None:
        self.options = options

    def setup(self) -> None:
        """Nothing to load."""

    def health(self) -> str | None:
        return None

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def close(self) -> None:
        """Nothing to release."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        texts = [sample.text for sample in samples]
        return [RewardResult(sum(letter in "aeiou" for letter in text) / max(1, len(text))) for text in texts]
