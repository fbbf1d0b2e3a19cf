"""The contract of a reward: it returns one result per sample, and no sample can end the run."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from chatlearn_testing.fakes.role_handle import CharacterCodes
from chatlearn_testing.loop_watch import blocks_of, least
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_is_printed


@dataclass(slots=True, frozen=True)
class RewardCase:
    """One sample and its expected result."""

    completion: str
    value: float | None
    """Expected value; None: the result must be an error, because the function raises, hangs, returns NaN or dies."""
    ground_truth: Any = None
    prompt: str = "What is it?"
    data_source: str = "conformance"
    token_ids: tuple[int, ...] | None = None
    """Token ids of the completion; None: one per character."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, float] | None = None
    """Expected components; None: any."""

    def sample(self, name: str, group: str | None = None) -> Sample:
        """Build a finished sample; token ids are character codes modulo 1,000.

        Args:
            name: of the sample and its prompt.
            group: id of its group; None gives it a group of its own.
        """
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
        return sample_from_completion(name, group or f"group of {name}", prompt, completion)


MANY = 64
"""Samples of one call: a fault of few milliseconds per sample shows."""
BLOCK_S = 0.15
"""Longest time for which ``score`` may keep the event loop from other work, seconds."""
MakeReward = Callable[[], Reward]


class RewardConformance(ConformanceSuite):
    """Contract tests that every reward must pass.

    A subclass sets ``backend``, ``options``, and ``cases``: at least two with different values. For a reward that runs
    user code, add cases that fail (``value=None``) and set a timeout of about a second in ``options``.
    """

    kind: ClassVar[Kind] = "reward"
    settable: ClassVar[frozenset[str]] = frozenset({"cases", "handles"})
    cases: ClassVar[Sequence[RewardCase]]
    handles: ClassVar[Mapping[str, RoleHandle]] = {}
    """Role name -> fake handle, for a reward that calls other roles (``chatlearn_testing.fakes.role_handle``)."""

    def test_is_a_reward(self, make_reward: MakeReward) -> None:
        """The object has every method of ``Reward`` and is healthy after ``setup``."""
        reward = make_reward()
        assert isinstance(reward, Reward), "a method of chatlearn_core.protocols.Reward is missing"
        assert reward.health() is None, f"not healthy right after setup: {reward.health()}"

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """The cases have at least two different values, so that a wrong order or a constant result is noticed."""
        assert len({case.value for case in self.cases if case.value is not None}) >= 2, (
            "set cases with at least two different values"
        )

    def test_one_result_a_sample_in_order(self, make_reward: MakeReward) -> None:
        """Results have the order of the samples, and every case gets its expected result.

        Values at wrong positions: results come in the order in which workers finished. A value instead of an error: an
        exception was swallowed, and the policy would learn from a meaningless number.
        """
        reward, cases = make_reward(), [*self.cases, *self.cases]
        for order in (range(len(cases)), range(len(cases))[::-1]):
            samples = [cases[i].sample(f"case-{i}") for i in order]
            results = self._score(reward, samples)
            assert len(results) == len(samples), f"{len(results)} results for {len(samples)} samples"
            for index, result in zip(order, results, strict=True):
                self._assert_verdict(cases[index], result)

    def test_a_sample_is_judged_by_itself(self, make_reward: MakeReward) -> None:
        """A sample's result does not depend on the other samples of the call, even if those fail."""
        if self.record().unit == "group":
            not_applicable("the record declares the unit 'group': samples are judged together")
        reward = make_reward()
        for index, case in enumerate(self.cases):
            [result] = self._score(reward, [case.sample(f"alone-{index}")])
            self._assert_verdict(case, result)
        together = [case.sample(f"together-{index}", "one group") for index, case in enumerate(self.cases)]
        for case, result in zip(self.cases, self._score(reward, together), strict=True):
            self._assert_verdict(case, result)

    def test_the_same_sample_gets_the_same_verdict(self, make_reward: MakeReward) -> None:
        """Scoring again, with the same object or a new one, gives equal values and components."""
        samples = [case.sample(f"again-{i}") for i, case in enumerate(self.cases) if case.value is not None]
        reward = make_reward()
        first, second, other = (self._score(r, samples) for r in (reward, reward, make_reward()))
        assert [(r.value, r.components) for r in first] == [(r.value, r.components) for r in second]
        assert [(r.value, r.components) for r in first] == [(r.value, r.components) for r in other]

    def test_a_verdict_is_of_the_whole_sample(self, make_reward: MakeReward) -> None:
        """What was scored before under the same id, prompt or text changes nothing.

        Samples of a resumed or repeated step have ids that were used before, and prompts and texts come again with
        other answers: a cache needs all of them as its key.
        """
        if self.record().unit == "group":
            not_applicable("the record declares the unit 'group': samples are judged together")
        used = make_reward()
        cases = [case for case in self.cases if case.value is not None]
        for case in cases:
            self._assert_verdict(case, self._score(used, [case.sample("the same")])[0])
        longer = [replace(case, token_ids=(65,) * 4 * (1 + len(case.completion))) for case in cases]
        crossed = [replace(case, completion=other.completion) for case in cases for other in cases if case != other]
        for case in (*longer[:1], *crossed[:4]):
            found, fresh = (self._score(reward, [case.sample("the same")])[0] for reward in (used, make_reward()))
            assert (found.value, found.components) == (fresh.value, fresh.components), (
                f"{case.completion!r} for {case.ground_truth!r} in {len(case.token_ids or case.completion)} tokens gets"
                f" {found.value} after other samples, {fresh.value} from a new object"
            )

    def test_a_sample_is_read_only(self, make_reward: MakeReward) -> None:
        """``score`` changes no field of a sample: excluding samples and setting rewards is the run's work."""
        samples = [case.sample(f"kept-{index}") for index, case in enumerate(self.cases)]
        before = [pickle.dumps(sample) for sample in samples]
        self._score(make_reward(), samples)
        for sample, content in zip(samples, before, strict=True):
            assert pickle.dumps(sample) == content, f"sample {sample.id!r} was changed"

    def test_the_process_stays_as_it_was(self, make_reward: MakeReward, capfd: pytest.CaptureFixture[str]) -> None:
        """``setup``, ``score`` and ``close`` print nothing to standard output and, as in every test, change no state
        that other roles of the process share: global seeds, torch's threads and default dtype, environment, working
        directory.

        Use a generator of your own (``np.random.default_rng``), and the logging module.
        """
        with nothing_is_printed(capfd):
            reward = make_reward()
            self._score(reward, [case.sample(f"quiet-{index}") for index, case in enumerate(self.cases)])
            reward.close()

    def test_odd_samples_are_marked_not_raised(self, make_reward: MakeReward) -> None:
        """No content of a sample makes ``score`` raise, hang or return a non-finite value."""
        good = next(case for case in self.cases if case.value is not None)
        odd = [
            RewardCase("", None),
            replace(good, completion="", token_ids=()),
            replace(good, completion="\x00\ud800"),
            RewardCase("\x00\ud800", None, ground_truth=float("nan")),
            RewardCase("9" * 5000, None, ground_truth="9"),
            RewardCase("\\frac{1}{0", None, ground_truth=object()),
            RewardCase("(" * 2000, None, ground_truth={"nested": [None]}),
        ]
        reward = make_reward()
        samples = [case.sample(f"odd-{i}") for i, case in enumerate(odd)]
        prompt = good.sample("odd-no-turn").prompt
        no_turn = Sample("odd-no-turn", "odd-no-turn", prompt, prompt.token_ids, np.zeros(len(prompt.token_ids), bool))
        results = self._score(reward, [*samples, no_turn])
        assert len(results) == len(odd) + 1, f"{len(results)} results for {len(odd) + 1} samples"
        for result in results:
            assert result.value is None or math.isfinite(result.value), f"{result.value} is not finite; mark an error"
        self._assert_verdict(good, self._score(reward, [good.sample("after the odd ones")])[0])

    def test_errors_name_the_sample(self, make_reward: MakeReward) -> None:
        """The error of a sample says which sample it is: the run logs it without its surroundings."""
        bad = [case for case in self.cases if case.value is None]
        if not bad:
            not_applicable("the suite sets no case with the value None")
        samples = [case.sample(f"error-of-{index}") for index, case in enumerate(bad)]
        for sample, result in zip(samples, self._score(make_reward(), samples), strict=True):
            assert sample.id in (result.error or ""), f"the error of sample {sample.id!r} names another: {result.error}"

    def test_components_are_those_of_the_cases(self, make_reward: MakeReward) -> None:
        """A case with ``components`` gets exactly these."""
        reward, told = make_reward(), [case for case in self.cases if case.components is not None]
        if not told:
            not_applicable("no case has components")
        for case, result in zip(
            told, self._score(reward, [c.sample(f"c-{i}") for i, c in enumerate(told)]), strict=True
        ):
            assert dict(result.components) == pytest.approx(dict(case.components or {})), case.completion

    def test_a_closed_reward_is_not_healthy(self, make_reward: MakeReward) -> None:
        """After ``close``, ``health`` says so: a run must not count on it."""
        reward = make_reward()
        reward.close()
        assert reward.health() is not None, "healthy although closed"

    def test_no_samples_no_results(self, make_reward: MakeReward) -> None:
        """``score([])`` returns an empty list."""
        assert self._score(make_reward(), []) == []

    def test_calls_may_overlap(self, make_reward: MakeReward) -> None:
        """Concurrent calls of ``score``, as a run makes during generation, each get their own results."""
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
        """After the caller cancels a call, the next call returns correct results."""
        reward = make_reward()
        good = next(case for case in self.cases if case.value is not None)

        async def cancel() -> list[RewardResult]:
            task = asyncio.ensure_future(reward.score([case.sample(f"gone-{i}") for i, case in enumerate(self.cases)]))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return await reward.score([good.sample("after")])

        self._assert_verdict(good, self._run(cancel())[0])

    def test_the_event_loop_stays_free(self, make_reward: MakeReward) -> None:
        """``score`` lets other coroutines run, also in the first call after ``setup``: requests are served meanwhile.

        Load models in ``setup``, and judge in a thread (``asyncio.to_thread``) or a process whatever takes milliseconds
        per sample.
        """
        samples = [case.sample(f"many-{number}") for number in range(MANY) for case in self.cases[:1]]

        def first_call() -> Any:
            reward = make_reward()  # ``setup`` may block
            return asyncio.wait_for(reward.score(samples), self.patience_s)

        blocked_s = least(lambda: blocks_of(first_call()).longest_s, BLOCK_S)
        assert blocked_s < BLOCK_S, f"the event loop stood still for {blocked_s:.2f} s while {MANY} samples were scored"

    def test_cancellation_reaches_the_caller(self, make_reward: MakeReward) -> None:
        """A call that is cancelled while it waits ends as cancelled; otherwise the end of a run would wait for it."""
        reward = make_reward()
        samples = [case.sample(f"cancelled-{i}") for i, case in enumerate(self.cases)]

        async def cancel() -> bool:
            task = asyncio.ensure_future(reward.score(samples))
            for _ in range(3):
                await asyncio.sleep(0)
            was_done = task.done()
            task.cancel()
            await asyncio.wait([task])
            return was_done or task.cancelled()

        assert self._run(cancel()), "a call that was cancelled returned or raised something else"

    def test_closing_leaves_no_process(self, make_reward: MakeReward) -> None:
        """``close`` ends every process and thread that the reward started, even a hanging one, removes the files that
        it wrote, and is idempotent.
        """
        with self.nothing_is_left():
            reward = make_reward()
            self._score(reward, [case.sample(f"last-{i}") for i, case in enumerate(self.cases)])
            reward.close()
            reward.close()

    @pytest.fixture
    def make_reward(self) -> Iterator[MakeReward]:
        """A function that builds a reward and sets it up; the fixture closes it after the test."""
        made: list[Reward] = []

        def make() -> Reward:
            context = RoleContext("reward", handles=self.handles, load_tokenizer=CharacterCodes)
            reward: Reward = self.build()(self.make_options(), context)
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
            assert result.error, f"{case.completion!r} must yield an error, but got the value {result.value}"
            return
        assert result.error is None, f"{case.completion!r}: {result.error}"
        assert type(result.value) is float, f"{case.completion!r} got a {type(result.value).__name__}, not a float"
        assert result.value == pytest.approx(case.value), f"{case.completion!r} got {result.value}, not {case.value}"
        assert all(math.isfinite(part) for part in result.components.values()), result.components
        count = len(case.completion) if case.token_ids is None else len(case.token_ids)
        assert result.token_values is None or len(result.token_values) == count, "token_values is not [C]"
        assert result.token_values is None or np.isfinite(result.token_values).all(), "token_values is not finite"
        if result.step_ends is not None:
            assert self.record().gives_steps, "the result has step_ends: set gives_steps in the plugin record"
