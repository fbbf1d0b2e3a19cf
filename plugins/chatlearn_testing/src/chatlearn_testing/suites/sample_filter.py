"""The contract of a sample filter: it names samples that it was given, each with a reason or a valid reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from chatlearn_core.exceptions import ChatLearnError
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols.data_store import TEXT, fields_read_by
from chatlearn_core.runtime.boundary import checked_reward
from chatlearn_core.types import (
    ArrayRef,
    Block,
    Completion,
    FinishReason,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TextRef,
    VersionSpan,
    sample_from_completion,
)
from chatlearn_core.types.array_ref import Rows
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.json_state import stored
from chatlearn_testing.suites.decisions import Ask, StatefulDecisionSuite

PROMPT_IDS = (7, 8, 9)
GROUP_SIZE = 8
LONGEST = (4, 9, 60, 11, 25, 120)
"""Tokens of the longest completion in each step: what a filter remembers of short ones decides about long ones."""


@dataclass(slots=True, frozen=True)
class FilterCase:
    """One scored sample, and what the filter must do with it."""

    completion: str = "42"
    value: float = 1.0
    """Its reward."""
    excluded: str | None = None
    """Reason for which it is excluded; None: it is not."""
    reward: float | None = None
    """Its reward afterwards; None: ``value``."""
    finish_reason: FinishReason = "stop"
    token_ids: tuple[int, ...] | None = None
    """Token ids of the completion; None: one per character."""
    token_values: tuple[float, ...] | None = None
    """Rewards of the completion's tokens."""
    group: str = "group"
    """Cases with the same text are samples of one prompt."""
    data_source: str = "conformance"
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the prompt's row."""

    def sample(self, name: str, group: str) -> Sample:
        """Build a scored sample; token ids are character codes modulo 1,000.

        Args:
            name: id of the sample.
            group: id of its group.
        """
        ids = [ord(c) % 1000 for c in self.completion] if self.token_ids is None else list(self.token_ids)
        sampling = SamplingParams(max_tokens=max(1, len(ids)))
        completion = Completion(
            request_id=name,
            token_ids=np.array(ids, np.int64),
            logprobs=np.full(len(ids), -1.0, np.float32),
            basis=sampling.basis,
            finish_reason=self.finish_reason,
            sampling=sampling,
            version_spans=(VersionSpan(0, len(ids), 0),) if ids else (),
            text=self.completion,
        )
        prompt = Prompt(
            id=f"prompt of {group}",
            token_ids=np.array(PROMPT_IDS, np.int64),
            text="What is it?",
            data_source=self.data_source,
            messages=({"role": "user", "content": "What is it?"},),
            columns=dict(self.columns),
        )
        sample = sample_from_completion(name, group, prompt, completion)
        values = None if self.token_values is None else np.array(self.token_values, np.float32)
        sample.reward = RewardResult(self.value, {"correct": self.value}, token_values=values)
        return sample


def verdicts_on(one: Any, samples: Sequence[Sample]) -> Any:
    """What the filter does with a step's samples, as a run asks it: exclusions, then rewards of the others."""
    excluded = dict(one.excluded(samples))
    change = getattr(one, "rewards", None)
    rest = [sample for sample in samples if sample.id not in excluded]
    rewards = {} if change is None else dict(change(rest))
    return excluded, {sample_id: _plain(reward) for sample_id, reward in rewards.items()}


class SampleFilterConformance(StatefulDecisionSuite):
    """Contract tests that every sample filter must pass.

    A subclass sets ``backend``, ``options`` and ``cases``: the samples of one step, at least one of which the filter
    excludes or gives another reward. See ``settable`` for what may be not true of it.
    """

    kind: ClassVar[Kind] = "sample_filter"
    settable: ClassVar[frozenset[str]] = frozenset({"cases", "reads_order"})
    cases: ClassVar[Sequence[FilterCase]]
    reads_order: ClassVar[bool] = False
    """True for a filter that depends on the order of a step's samples."""
    methods: ClassVar[tuple[str, ...]] = ("excluded", "state_dict", "load_state_dict")
    ask: ClassVar[Ask] = staticmethod(verdicts_on)

    def questions(self) -> Sequence[Sequence[Sample]]:
        return [self._step(number) for number in range(len(LONGEST))]

    def test_cases_hold_a_reaction(self) -> None:
        """The cases can tell a filter that does nothing from one that works."""
        acts = [case for case in self.cases if case.excluded is not None or case.reward is not None]
        assert acts, "set cases: samples, at least one of which is excluded or gets another reward"

    def test_samples_of_the_cases_are_treated_as_expected(self) -> None:
        """Exactly the samples of cases with a reason are excluded, for it; the others have the expected reward."""
        samples = self._of_cases("case", self.cases)
        excluded, rewards = verdicts_on(self._made(), samples)
        for case, sample in zip(self.cases, samples, strict=True):
            found = excluded.get(sample.id)
            assert found == case.excluded, f"{case} is excluded for {found!r}, not {case.excluded!r}"
            if found is None:
                value = rewards[sample.id][0] if sample.id in rewards else case.value
                expected = case.value if case.reward is None else case.reward
                assert value == pytest.approx(expected, abs=1e-6), f"{case} has the reward {value}, not {expected}"

    def test_verdicts_are_on_samples_that_it_was_given(self) -> None:
        """Exclusions and rewards are mappings from ids of the given samples."""
        one = self._made()
        for samples in self.questions():
            excluded = one.excluded(samples)
            assert isinstance(excluded, Mapping), (
                f"excluded returned {excluded!r:.80}; it is a mapping of ids to reasons"
            )
            given = {sample.id for sample in samples}
            assert excluded.keys() <= given, (
                f"it excludes {sorted(excluded.keys() - given)[:3]}, which it was not given"
            )
            rest = [sample for sample in samples if sample.id not in excluded]
            rewards = self._rewards(one, rest)
            assert isinstance(rewards, Mapping), f"rewards returned {rewards!r:.80}; it is a mapping of ids to rewards"
            others = rewards.keys() - {sample.id for sample in rest}
            assert not others, f"it gives {sorted(others)[:3]} a reward, but was not given them"

    def test_reasons_can_be_counted(self) -> None:
        """A reason is a text in one line that holds no id of a sample or group: each is the name of a metric,
        ``samples/excluded/<reason>``, so few reasons must be enough for a whole run.
        """
        one, reasons = self._made(), set()
        for samples in self.questions():
            for sample_id, reason in one.excluded(samples).items():
                [sample] = [sample for sample in samples if sample.id == sample_id]
                assert isinstance(reason, str), f"the reason {reason!r} is no text"
                assert reason.strip(), "a reason is empty"
                assert "\n" not in reason, f"the reason {reason!r} has several lines"
                named = [name for name in (sample.id, sample.group_id, sample.prompt.id) if name in reason]
                assert not named, f"the reason {reason!r} holds the id {named[0]!r}"
                reasons.add(reason)
        assert len(reasons) <= 10, (
            f"there are {len(reasons)} reasons in {len(LONGEST)} steps: {sorted(reasons)[:4]}, ..."
        )

    def test_rewards_are_valid(self) -> None:
        """A new reward is a ``RewardResult`` with finite numbers, and with one value for each token of the completion
        if it has values of tokens.
        """
        one = self._made()
        for samples in self.questions():
            excluded = one.excluded(samples)
            rest = {sample.id: sample for sample in samples if sample.id not in excluded}
            for sample_id, reward in self._rewards(one, list(rest.values())).items():
                checked = checked_reward(reward, rest[sample_id])
                assert checked.error is None, f"the reward of {sample_id!r}: {checked.error}"

    def test_any_sequence_of_samples_is_taken(self) -> None:
        """A tuple gets the verdicts of a list."""
        one, other = self._made(), self._made()
        for samples in self.questions():
            assert verdicts_on(one, tuple(samples)) == verdicts_on(other, list(samples)), "a tuple is judged otherwise"

    def test_the_order_of_samples_does_not_matter(self) -> None:
        """The samples of a step in another order get the same verdicts, up to rounding: their order depends on how
        their prompts were drawn.
        """
        if self.reads_order:
            not_applicable("reads_order is True: the filter depends on the order of samples")
        for turned in (None, *range(1, len(self._step(0)), 2)):
            one, other = self._made(), self._made()
            for samples in self.questions():
                order = samples[::-1] if turned is None else [*samples[turned:], *samples[:turned]]
                excluded, rewards = verdicts_on(one, samples)
                found, changed = verdicts_on(other, order)
                assert found == excluded, f"in another order, {found} is excluded instead of {excluded}"
                assert changed.keys() == rewards.keys(), "in another order, other samples get a reward"
                for name, reward in rewards.items():
                    assert changed[name][0] == pytest.approx(reward[0], rel=1e-9), f"{name!r} gets another reward"

    def test_no_samples_no_verdicts(self) -> None:
        """A step whose samples are all excluded already, or by this filter, asks about none: nothing is named, the
        state can be stored, and the next step is judged.
        """
        one = self._made()
        assert verdicts_on(one, []) == ({}, {}), "it names samples although there are none"
        stored(one.state_dict())
        for samples in self.questions():
            verdicts_on(one, samples)
            assert verdicts_on(one, []) == ({}, {}), "it names samples although there are none"

    def test_odd_samples_do_no_harm(self) -> None:
        """A sample without a reward (an algorithm without rewards), without turns (a demonstration), or with an empty
        completion, and a group of one, are judged, or refused with a ``ChatLearnError``; the state can be stored.
        """
        plain = FilterCase().sample("odd#0", "odd")
        odd = {
            "without a reward": replace(plain, reward=None),
            "with a reward that failed": replace(plain, reward=RewardResult(None, error="it failed")),
            "without turns": replace(plain, turns=()),
            "with an empty completion": FilterCase("").sample("odd#0", "odd"),
            "with a large reward": replace(plain, reward=RewardResult(1e6)),
        }
        for what, sample in odd.items():
            for before in (False, True):
                one = self._made()
                if before:
                    verdicts_on(one, self._step(0))
                try:
                    verdicts_on(one, [sample])
                except ChatLearnError:
                    continue
                except Exception as error:
                    raise AssertionError(f"a sample {what} raises {error!r}") from error
                stored(one.state_dict())

    def test_reads_only_what_it_declares(self) -> None:
        """Arrays and texts that are not in ``reads`` stay with the workers that made them: only those that the filter
        names there are fetched. Their lengths are always known.
        """
        one = self._made()
        reads = fields_read_by(one)
        expected, found = verdicts_on(self._made(), self._step(0)), None
        samples = [_as_stored(sample, reads) for sample in self._step(0)]
        try:
            found = verdicts_on(one, samples)
        except Exception as error:
            raise AssertionError(f"it reads more than reads={sorted(reads)} declares: {error!r}") from error
        assert found == expected, "it judges samples whose arrays stay with the workers otherwise"

    # Internal methods

    def _rewards(self, one: Any, samples: Sequence[Sample]) -> Mapping[str, RewardResult]:
        change = getattr(one, "rewards", None)
        return {} if change is None else change(samples)

    def _of_cases(self, name: str, cases: Sequence[FilterCase]) -> list[Sample]:
        return [
            case.sample(f"{name}/{case.group}@0#{index}", f"{name}/{case.group}@0") for index, case in enumerate(cases)
        ]

    def _step(self, number: int) -> list[Sample]:
        """The samples of a step: those of the cases, of which some are left out in each, and groups of the suite."""
        kept = [case for index, case in enumerate(self.cases) if (index + number) % 3 or len(self.cases) < 3]
        samples = self._of_cases(f"step-{number}", kept)
        for group in range(2):
            name = f"step-{number}/own-{group}@{number}"
            for index in range(GROUP_SIZE):
                share = ((5 * index + 3 * group + number) % (2 * GROUP_SIZE) + 1) / (2 * GROUP_SIZE)
                case = FilterCase(
                    "4" * max(1, round(LONGEST[number] * share)),
                    float((index + number) % 2) if group else 0.25 * index - 0.5 * number,
                    finish_reason="length" if (index + number) % 4 == 3 else "stop",
                )
                samples.append(case.sample(f"{name}#{index}", name))
        return samples


def _plain(reward: Any) -> Any:
    """A reward as values that can be compared and pickled."""
    if not isinstance(reward, RewardResult):
        return reward
    tokens = None if reward.token_values is None else tuple(np.asarray(reward.token_values).tolist())
    return reward.value, dict(reward.components), tokens, reward.error, reward.answer


def _as_stored(sample: Sample, reads: frozenset[str]) -> Sample:
    """A copy of a sample in which all values that are not in ``reads`` are references without values."""

    def left(name: str, array: Any) -> Any:
        return array if name in reads else ArrayRef([array], array.shape[1:], array.dtype, sample.id, name)

    text: Any = TextRef(Rows(cast("Block", None), TEXT, 0, 1), sample.id)
    turns = sample.turns if TEXT in reads else tuple(replace(turn, text=text) for turn in sample.turns)
    return replace(
        sample,
        token_ids=left("token_ids", sample.token_ids),
        loss_mask=sample.loss_mask,
        token_data={name: left(name, array) for name, array in sample.token_data.items()},
        turns=turns,
    )
