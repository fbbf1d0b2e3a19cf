"""The contract of a reward: one verdict a sample, and no sample can take the run down."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest

from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Reward, RoleContext, RoleHandle
from chatlearn_core.types import (
    Completion,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.processes import descendants
from chatlearn_testing.suites.conformance_suite import ConformanceSuite


@dataclass(slots=True, frozen=True)
class RewardCase:
    """One sample, and what the reward must say of it."""

    completion: str
    value: float | None
    """None: it cannot be judged, so the result must be an error (the function raises, hangs, returns NaN, dies)."""
    ground_truth: Any = None
    prompt: str = "What is it?"
    data_source: str = "conformance"
    token_ids: tuple[int, ...] | None = None
    """Of the completion; None: one for each character."""
    columns: Mapping[str, Any] = field(default_factory=dict)

    def sample(self, name: str) -> Sample:
        """The case as a finished sample; ids of tokens are those of characters, below 1,000."""
        token_ids = [ord(c) % 1000 for c in self.completion] if self.token_ids is None else list(self.token_ids)
        prompt_ids = np.array([ord(c) % 1000 for c in self.prompt], dtype=np.int64)
        sampling = SamplingParams(max_tokens=max(1, len(token_ids)))
        completion = Completion(
            request_id=name,
            token_ids=np.array(token_ids, dtype=np.int64),
            logprobs=np.full(len(token_ids), -1.0, dtype=np.float32),
            basis=sampling.basis,
            finish_reason="stop",
            sampling=sampling,
            version_spans=(VersionSpan(0, len(token_ids), 0),) if token_ids else (),
            text=self.completion,
        )
        prompt = Prompt(
            id=name,
            token_ids=prompt_ids,
            text=self.prompt,
            data_source=self.data_source,
            ground_truth=self.ground_truth,
            messages=({"role": "user", "content": self.prompt},),
            columns=dict(self.columns),
        )
        return sample_from_completion(name, f"group of {name}", prompt, completion)


MakeReward = Callable[[], Reward]


class RewardConformance(ConformanceSuite):
    """Every reward passes this.

    A subclass sets ``backend``, ``options``, and ``cases``: at least two with different values, and for a reward that
    runs a user's code also some that fail (``value=None``), with options that give up after about a second.
    """

    kind: ClassVar[Kind] = "reward"
    settable: ClassVar[frozenset[str]] = frozenset({"cases", "handles"})
    cases: ClassVar[Sequence[RewardCase]]
    handles: ClassVar[Mapping[str, RoleHandle]] = {}
    """Of a reward that calls other roles: what stands for each (``chatlearn_testing.fakes.role_handle``)."""

    def test_is_a_reward(self, make_reward: MakeReward) -> None:
        """Every method of ``Reward``; healthy after ``setup``."""
        reward = make_reward()
        assert isinstance(reward, Reward), "a method of chatlearn_core.protocols.Reward is missing"
        assert reward.health() is None, f"not healthy right after setup: {reward.health()}"

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """The suite's cases have two different values, so that an order or a default can be seen."""
        assert len({case.value for case in self.cases if case.value is not None}) >= 2, (
            "give cases with at least two different values"
        )

    def test_one_result_a_sample_in_order(self, make_reward: MakeReward) -> None:
        """Every case gets its own verdict, at its own place, in any order of the samples.

        Values at wrong places: results come in the order in which workers finished. An error that became a value: an
        exception was swallowed, and the policy learns from a meaningless number.
        """
        reward, cases = make_reward(), [*self.cases, *self.cases]
        for order in (range(len(cases)), range(len(cases))[::-1]):
            samples = [cases[i].sample(f"case-{i}") for i in order]
            results = self._score(reward, samples)
            assert len(results) == len(samples), f"{len(results)} results for {len(samples)} samples"
            for index, result in zip(order, results, strict=True):
                self._assert_verdict(cases[index], result)

    def test_a_sample_is_judged_by_itself(self, make_reward: MakeReward) -> None:
        """Alone, a sample gets what it gets among others; a failing neighbour costs it nothing."""
        if self.record().unit == "group":
            not_applicable("the record declares the unit 'group': samples are judged together")
        reward = make_reward()
        for index, case in enumerate(self.cases):
            [result] = self._score(reward, [case.sample(f"alone-{index}")])
            self._assert_verdict(case, result)

    def test_the_same_sample_gets_the_same_verdict(self, make_reward: MakeReward) -> None:
        """Scored again, by the same object and by a new one, values and components are equal."""
        samples = [case.sample(f"again-{i}") for i, case in enumerate(self.cases) if case.value is not None]
        reward = make_reward()
        first, second, other = (self._score(r, samples) for r in (reward, reward, make_reward()))
        assert [(r.value, r.components) for r in first] == [(r.value, r.components) for r in second]
        assert [(r.value, r.components) for r in first] == [(r.value, r.components) for r in other]

    def test_odd_samples_are_marked_not_raised(self, make_reward: MakeReward) -> None:
        """Nothing in a sample makes ``score`` raise, hang, or return a value that is not finite."""
        odd = [
            RewardCase("", None),
            RewardCase("\x00\ud800", None, ground_truth=float("nan")),
            RewardCase("9" * 5000, None, ground_truth="9"),
            RewardCase("\\frac{1}{0", None, ground_truth=object()),
            RewardCase("(" * 2000, None, ground_truth={"nested": [None]}),
        ]
        reward = make_reward()
        results = self._score(reward, [case.sample(f"odd-{i}") for i, case in enumerate(odd)])
        assert len(results) == len(odd)
        for result in results:
            assert result.value is None or math.isfinite(result.value), f"{result.value} is not finite; mark an error"
        good = next(case for case in self.cases if case.value is not None)
        self._assert_verdict(good, self._score(reward, [good.sample("after the odd ones")])[0])

    def test_no_samples_no_results(self, make_reward: MakeReward) -> None:
        """An empty call is legal."""
        assert self._score(make_reward(), []) == []

    def test_calls_may_overlap(self, make_reward: MakeReward) -> None:
        """``score`` runs while generation goes on: two calls at once do not mix up their results."""
        reward = make_reward()
        good = [case for case in self.cases if case.value is not None]

        async def together() -> list[list[RewardResult]]:
            one = [case.sample(f"left-{i}") for i, case in enumerate(good)]
            other = [case.sample(f"right-{i}") for i, case in enumerate(good[::-1])]
            return list(await asyncio.gather(reward.score(one), reward.score(other)))

        left, right = self._run(together())
        for cases, results in ((good, left), (good[::-1], right)):
            for case, result in zip(cases, results, strict=True):
                self._assert_verdict(case, result)

    def test_a_cancelled_call_leaves_it_usable(self, make_reward: MakeReward) -> None:
        """The caller may give up waiting; the next call is answered as if nothing had been."""
        reward = make_reward()
        good = next(case for case in self.cases if case.value is not None)

        async def cancel() -> list[RewardResult]:
            task = asyncio.ensure_future(reward.score([case.sample(f"gone-{i}") for i, case in enumerate(self.cases)]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return await reward.score([good.sample("after")])

        self._assert_verdict(good, self._run(cancel())[0])

    def test_closing_leaves_no_process(self, make_reward: MakeReward) -> None:
        """``close`` ends every process that the reward started, also while one hangs; twice is fine."""
        before = set(descendants(os.getpid()))
        reward = make_reward()
        self._score(reward, [case.sample(f"last-{i}") for i, case in enumerate(self.cases)])
        reward.close()
        reward.close()
        left = set(descendants(os.getpid())) - before
        assert not left, f"processes {sorted(left)} outlive close"

    @pytest.fixture
    def make_reward(self) -> Iterator[MakeReward]:
        """A reward, set up, and closed at the end of the test."""
        made: list[Reward] = []

        def make() -> Reward:
            reward: Reward = self.build()(self.make_options(), RoleContext("reward", handles=self.handles))
            reward.setup()
            made.append(reward)
            return reward

        yield make
        for reward in made:
            reward.close()

    def _score(self, reward: Reward, samples: Sequence[Sample]) -> list[RewardResult]:
        results: list[RewardResult] = self._run(reward.score(samples))
        return results

    def _run(self, work: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, self.patience_s)

        return asyncio.run(bounded())

    def _assert_verdict(self, case: RewardCase, result: RewardResult) -> None:
        if case.value is None:
            assert result.error, f"{case.completion!r} cannot be judged, and got the value {result.value}"
            return
        assert result.error is None, f"{case.completion!r}: {result.error}"
        assert result.value == pytest.approx(case.value), f"{case.completion!r} got {result.value}, not {case.value}"
        assert all(math.isfinite(part) for part in result.components.values()), result.components
        count = len(case.completion) if case.token_ids is None else len(case.token_ids)
        assert result.token_values is None or len(result.token_values) == count, "token_values is not [C]"
