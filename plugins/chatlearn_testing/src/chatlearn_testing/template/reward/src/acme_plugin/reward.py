"""The reward ``acme``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chatlearn_core.protocols import MemoryPart, RoleContext
from chatlearn_core.types import RewardResult, Sample

from acme_plugin.options import AcmeOptions


class AcmeReward:
    """The share of keywords that a completion contains, less a penalty for every token beyond a budget.

    Implements ``chatlearn_core.protocols.Reward``. Components: ``coverage`` (0 to 1), ``length_penalty``.
    """

    def __init__(self, options: AcmeOptions, context: RoleContext) -> None:
        self.options = options
        self.context = context
        self._ready = False

    def setup(self) -> None:
        """Load models and open connections here, so that the first call of ``score`` need not wait for them."""
        self._ready = True

    def health(self) -> str | None:
        return None if self._ready else "not set up, or closed"

    def offload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def onload(self, parts: Collection[MemoryPart]) -> None:
        """Nothing is on a device."""

    def close(self) -> None:
        self._ready = False

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order. The run counts and drops samples whose result is an error."""
        return [self._judge(sample) for sample in samples]

    def _judge(self, sample: Sample) -> RewardResult:
        keywords = self._keywords(sample)
        if not keywords:
            return RewardResult(
                None,
                error=(
                    f"sample {sample.id!r}: ground_truth is {sample.prompt.ground_truth!r}; it must be a string or a "
                    "list of strings where the option keywords is empty"
                ),
            )
        text = sample.text.casefold()
        coverage = sum(keyword.casefold() in text for keyword in keywords) / len(keywords)
        excess = max(0, sample.num_completion_tokens - self.options.length_budget)
        penalty = self.options.length_penalty * excess
        return RewardResult(coverage - penalty, {"coverage": coverage, "length_penalty": -penalty})

    def _keywords(self, sample: Sample) -> Sequence[str]:
        """Return the keywords of a sample; empty if it has none."""
        wanted = self.options.keywords or sample.prompt.ground_truth
        if isinstance(wanted, str):
            return (wanted,)
        if isinstance(wanted, Sequence) and all(isinstance(keyword, str) for keyword in wanted):
            return wanted
        return ()
