"""One reward role made of one or more rewards: routed by data source, combined by weight, with results checked."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from chatlearn_core.exceptions import RoleLostError
from chatlearn_core.protocols import MemoryPart, Reward
from chatlearn_core.runtime.boundary import checked_reward, checked_rewards, said
from chatlearn_core.runtime.plan import RewardGate, RolePlan
from chatlearn_core.types import RewardResult, Sample
from chatlearn_runtime_kit.own_time import CURRENT, OwnTime


@dataclass(slots=True, frozen=True)
class RewardPart:
    """One reward with its weight."""

    name: str
    reward: Reward
    weight: float = 1.0
    data_sources: frozenset[str] | None = None
    """None: every data source."""
    unit: Literal["sample", "group"] = "sample"
    """The unit that the reward judges at a time (``RewardSpec.unit``)."""
    gate: RewardGate | None = None
    """None: it always counts."""

    def applies_to(self, sample: Sample) -> bool:
        """Whether this part judges the sample."""
        return self.data_sources is None or sample.prompt.data_source in self.data_sources


class CombinedReward:
    """The reward group of a runtime that judges in this process.

    The value of a sample is the weighted sum over the parts that apply to it. If one of them fails on it (an
    exception, a timeout, NaN, a wrong number of results), the sample has an error instead of a value, because a sum
    without that part would be a different reward. A part with a gate counts as 0 where the gate's value is too low.

    Timing determines which samples share a call, but must not determine which samples fail. If a call fails as a whole,
    each of its units (samples or groups) is judged again separately, and only units that fail separately get an error.
    """

    def __init__(self, name: str, parts: Sequence[RewardPart], timeout_s: float) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.timeout_s = timeout_s

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return one result per sample, in order; failures of a reward become results with errors.

        Raises:
            RoleLostError: a reward, or a role that it calls, can no longer work.
        """
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
        """The part's results, one per sample; takes at most twice the timeout."""
        results = await self._call(part, samples)
        if not isinstance(results, str):
            return results
        units = _units(part, samples)
        if len(units) == 1:
            return [RewardResult(None, error=results) for _ in samples]
        verdicts: dict[int, RewardResult] = {}

        async def alone(unit: list[int]) -> None:
            again = await self._guarded(part, [samples[i] for i in unit])
            verdicts.update(zip(unit, again, strict=True))

        await asyncio.gather(*(alone(unit) for unit in units))
        return [verdicts[i] for i in range(len(samples))]

    async def _call(self, part: RewardPart, samples: list[Sample]) -> list[RewardResult] | str:
        """One call's results, or the problem with the call as a whole."""
        results: Any = None
        problem: list[RewardResult] | str
        clock = OwnTime(self.timeout_s)
        current = CURRENT.set(clock)
        try:
            async with clock.limit:
                results = await part.reward.score(samples)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the run is being stopped
            problem = f"the reward cancelled itself: {said(error)}"
        except RoleLostError:
            raise  # no sample can be scored, so the run ends
        except (Exception, SystemExit) as error:
            if clock.limit.expired():
                problem = f"no answer within {self.timeout_s:g} s (roles.{self.name}.timeout_s)"
            else:
                problem = said(error)
        else:
            problem = checked_rewards(results, samples)
        finally:
            clock.over = True
            CURRENT.reset(current)
        if clock.lost:
            raise clock.lost[0]
        return problem

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
        by_token: list[str] = []
        by_step: dict[str, Any] = {}
        answer = None
        for part in self.parts:
            result = verdict.get(part.name)
            if result is None or result.value is None:
                continue
            counts = self._counts(part, verdict)
            value += part.weight * result.value if counts else 0.0
            components[part.name] = result.value if counts else 0.0
            for name, component in result.components.items():
                components.setdefault(name, component)
            answer = result.answer if answer is None else answer
            if result.token_values is not None and counts:
                weighted = part.weight * result.token_values
                token_values = weighted if token_values is None else token_values + weighted
                if result.step_ends is None:
                    by_token.append(part.name)
                else:
                    by_step[part.name] = result.step_ends
        if by_token and by_step:
            problem = f"{by_token[0]} gives rewards of single tokens and {next(iter(by_step))} of steps: remove one"
            return RewardResult(None, error=problem)
        ends = np.unique(np.concatenate(list(by_step.values()))) if by_step else None
        whole = RewardResult(value, components, token_values, answer=answer, step_ends=ends)
        return checked_reward(whole, sample, "the weighted sum")

    def _counts(self, part: RewardPart, verdict: dict[str, RewardResult]) -> bool:
        if part.gate is None:
            return True
        decisive = verdict.get(self.parts[part.gate.part].name)
        return decisive is not None and decisive.value is not None and decisive.value >= part.gate.at_least

    async def offload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every part."""
        for part in self.parts:
            part.reward.offload(parts)

    async def onload(self, parts: Collection[MemoryPart]) -> None:
        """Pass on to every part."""
        for part in self.parts:
            part.reward.onload(parts)


def part_name(role: RolePlan, key: str) -> str:
    """Name of a reward part in components: its backend, numbered if the backend occurs more than once."""
    names = [backend.record.name for backend in role.backends]
    index = [backend.key for backend in role.backends].index(key)
    name = names[index]
    return name if names.count(name) == 1 else f"{name}_{index}"


def _units(part: RewardPart, samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of the samples that the part judges together, in order of arrival."""
    units: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        units.setdefault(sample.group_id if part.unit == "group" else sample.id, []).append(index)
    return list(units.values())
