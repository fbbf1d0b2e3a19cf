"""One reward role made of one or several rewards: routed by data source, combined by weight, never trusted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chatlearn_core.protocols import MemoryPart, Reward
from chatlearn_core.types import RewardResult, Sample


@dataclass(slots=True, frozen=True)
class RewardPart:
    """One reward with its share."""

    name: str
    reward: Reward
    weight: float = 1.0
    data_sources: frozenset[str] | None = None
    """None: every data source."""

    def applies_to(self, sample: Sample) -> bool:
        """Whether this part judges the sample."""
        return self.data_sources is None or sample.prompt.data_source in self.data_sources


class CombinedReward:
    """The reward group of the local runtime.

    The value of a sample is the weighted sum over the parts that apply to it. If one of them fails on it (an
    exception, a timeout, NaN, a wrong number of results), the sample has an error instead of a value: a sum with a
    part missing would be another reward.
    """

    def __init__(self, name: str, parts: Sequence[RewardPart], timeout_s: float) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.timeout_s = timeout_s

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """One result a sample, in order; never raises for what a reward does."""
        verdicts: list[dict[str, RewardResult]] = [{} for _ in samples]

        async def run(part: RewardPart) -> None:
            chosen = [i for i, sample in enumerate(samples) if part.applies_to(sample)]
            if chosen:
                results = await self._guarded(part, [samples[i] for i in chosen])
                for i, result in zip(chosen, results, strict=True):
                    verdicts[i][part.name] = result

        await asyncio.gather(*(run(part) for part in self.parts))
        return [self._combine(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]

    async def _guarded(self, part: RewardPart, samples: list[Sample]) -> list[RewardResult]:
        """The part's results, or one error for all of them."""
        try:
            results = await asyncio.wait_for(part.reward.score(samples), self.timeout_s)
        except TimeoutError:
            problem = f"no answer within {self.timeout_s:g} s (roles.{self.name}.timeout_s)"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if len(results) == len(samples):
                return [_finite(result) for result in results]
            problem = f"returned {len(results)} results for {len(samples)} samples"
        return [RewardResult(None, error=problem) for _ in samples]

    def _combine(self, sample: Sample, verdict: dict[str, RewardResult]) -> RewardResult:
        if not verdict:
            return RewardResult(
                None,
                error=f"no reward is meant for data_source {sample.prompt.data_source!r}: "
                f"add a part for it under roles.{self.name}.parts",
            )
        errors = [f"{name}: {result.error}" for name, result in verdict.items() if result.error is not None]
        if errors:
            return RewardResult(None, error="; ".join(errors))
        if len(self.parts) == 1 and self.parts[0].weight == 1.0:
            return next(iter(verdict.values()))
        value = 0.0
        components: dict[str, float] = {}
        token_values = None
        for part in self.parts:
            result = verdict.get(part.name)
            if result is None or result.value is None:
                continue
            value += part.weight * result.value
            components[part.name] = result.value
            for name, component in result.components.items():
                components.setdefault(name, component)
            if result.token_values is not None:
                weighted = part.weight * result.token_values
                token_values = weighted if token_values is None else token_values + weighted
        return RewardResult(value, components, token_values)

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every part."""
        for part in self.parts:
            part.reward.offload(parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every part."""
        for part in self.parts:
            part.reward.onload(parts)


def _finite(result: RewardResult) -> RewardResult:
    if result.value is not None and not math.isfinite(result.value):
        return RewardResult(None, result.components, error=f"the reward is {result.value}, not a finite number")
    return result
