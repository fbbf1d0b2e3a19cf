"""The contract of an environment: rollouts of exactly the tokens that the policy was asked with and sampled."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError, TurnLimitError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Environment, OnTokens, RoleContext, RolloutContext, RolloutOrder
from chatlearn_core.types import (
    Completion,
    GenerateRequest,
    Prompt,
    Rollout,
    RolloutStatus,
    Sample,
    SamplingParams,
    VersionSpan,
)
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.fakes.tokenizer import CharacterTokenizer
from chatlearn_testing.suites.conformance_suite import ConformanceSuite, nothing_is_printed

MAX_TOKENS = 4096
TURN_TOKENS = 512
NUM_TOGETHER = 6
"""Rollouts of each case that are made at the same time."""


@dataclass(slots=True, frozen=True)
class EnvironmentCase:
    """What a policy says, and the rollout that must come of it."""

    replies: tuple[str, ...]
    """The policy's turns, in order. An environment that asks for more gets the last one again."""
    value: float | None = None
    """Expected reward; None: the environment gives none, and a reward role judges the rollout."""
    status: RolloutStatus = "finished"
    num_turns: int | None = None
    """Expected number of turns; None: as many as there are replies."""
    prompt: str = "What is it?"
    ground_truth: Any = None


@dataclass(slots=True)
class ScriptedPolicy:
    """Answers each rollout's requests with the replies of its case, one token per character, ended by the tokenizer's
    end-of-sequence token. The completions of concurrent rollouts come in an order of their own.
    """

    tokenizer: Any
    replies: Sequence[str]
    fails_at: int | None = None
    """Index of the request of a rollout that fails; None: none does."""
    holds: asyncio.Event | None = None
    """Every request waits for it; None: no request waits."""
    asked: dict[str, list[tuple[str, GenerateRequest]]] = field(default_factory=dict)
    """Rollout -> its requests, each with the handle that was asked."""
    said: dict[str, list[Completion]] = field(default_factory=dict)

    async def __call__(self, handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /) -> Completion:
        name, _, number = request.id.rpartition("/")
        requests = self.asked.setdefault(name, [])
        index = len(requests)
        requests.append((handle, request))
        for _ in range((len(name) + int(number)) % 3 + 1):
            await asyncio.sleep(0)
        if self.holds is not None:
            await self.holds.wait()
        if index == self.fails_at:
            raise BackendError("the generator was lost")
        text = self.replies[min(index, len(self.replies) - 1)]
        ids = [i for part in text for i in self.tokenizer.encode(part, add_special_tokens=False)]
        ids.append(self.tokenizer.eos_token_id)
        cut = np.array(ids[: request.sampling.max_tokens], np.int64)
        completion = Completion(
            request_id=request.id,
            token_ids=cut,
            logprobs=(-0.25 - np.arange(len(cut)) / 64 - index).astype(np.float32),
            basis=request.sampling.basis,
            finish_reason="stop" if len(cut) == len(ids) else "length",
            sampling=request.sampling,
            version_spans=(VersionSpan(0, len(cut), 3 + index),),
            text=text,
        )
        self.said.setdefault(name, []).append(completion)
        if on_tokens is not None:
            on_tokens(0, cut.tolist())
        return completion


MakeEnvironment = Callable[[], Environment]


class EnvironmentConformance(ConformanceSuite):
    """Contract tests that every environment must pass.

    A subclass sets ``backend``, ``options`` and ``cases``, and ``tokenizer`` if the environment needs a chat template.
    """

    kind: ClassVar[Kind] = "environment"
    settable: ClassVar[frozenset[str]] = ConformanceSuite.settable | {"cases", "tokenizer"}
    cases: ClassVar[Sequence[EnvironmentCase]]
    tokenizer: ClassVar[str] = "chatlearn_testing.fakes.tokenizer:CharacterTokenizer"
    """Import string of a function without arguments that returns the tokenizer of the run's model; by default one token
    per character."""

    def test_is_an_environment(self, make_environment: MakeEnvironment) -> None:
        """The object has every method of ``Environment``, and ``rollout`` is a coroutine function."""
        environment = make_environment()
        assert isinstance(environment, Environment), "a method of chatlearn_core.protocols.Environment is missing"
        assert asyncio.iscoroutinefunction(environment.rollout), "rollout is not an async function"

    def test_cases_can_tell_right_from_wrong(self) -> None:
        """The cases have at least two different outcomes, so that a constant result is noticed."""
        outcomes = {(case.value, case.status, case.num_turns or len(case.replies)) for case in self.cases}
        assert len(outcomes) >= 2, "set cases with at least two different rewards, statuses or numbers of turns"

    def test_cases_end_as_expected(self, make_environment: MakeEnvironment) -> None:
        """Every case ends with its status, reward and number of turns."""
        environment = make_environment()
        for index, case in enumerate(self.cases):
            rollout, policy = self._make(environment, case, f"case-{index}")
            turns = case.num_turns or len(case.replies)
            found = len(policy.asked[rollout.id])
            assert found == turns, f"case {index}: the policy was asked {found} times, not {turns}"
            assert rollout.status == case.status, f"case {index}: the rollout is {rollout.status}, not {case.status}"
            self._assert_reward(case, rollout, index)

    def test_a_rollout_is_the_one_that_was_ordered(self, make_environment: MakeEnvironment) -> None:
        """``context.finished`` gives a rollout the id and the group of its order, and samples have ids that begin with
        it, each once.
        """
        environment = make_environment()
        for index, case in enumerate(self.cases):
            rollout, _ = self._make(environment, case, f"ordered-{index}")
            assert isinstance(rollout, Rollout), f"rollout returned {rollout!r}; return context.finished(...)"
            assert rollout.group_id == f"group of ordered-{index}"
            ids = [sample.id for sample in rollout.samples]
            assert ids, "the rollout has no sample"
            assert len(set(ids)) == len(ids), f"two samples have one id: {ids}; use context.sequence(suffix)"
            assert all(name.startswith(rollout.id) for name in ids), f"{ids} do not begin with {rollout.id!r}"

    def test_tokens_are_those_that_were_sampled(self, make_environment: MakeEnvironment) -> None:
        """A sample holds each turn's tokens as the policy sampled them, with their logprobs and policy versions, and
        before each turn exactly the tokens that its request carried.

        Text that is decoded and encoded again gives other tokens than those sampled: append
        ``completion.token_ids`` (``sequence.sampled``) and only what the environment says as new tokens.
        """
        environment = make_environment()
        for index, case in enumerate(self.cases):
            rollout, policy = self._make(environment, case, f"tokens-{index}")
            for sample in rollout.samples:
                self._assert_tokens(sample, policy, rollout.id)

    def test_the_loss_mask_covers_sampled_tokens(self, make_environment: MakeEnvironment) -> None:
        """``loss_mask`` is True for the tokens that the policy sampled and for no other."""
        environment = make_environment()
        for index, case in enumerate(self.cases):
            rollout, _ = self._make(environment, case, f"mask-{index}")
            for sample in rollout.samples:
                sampled = np.zeros(len(sample.token_ids), np.bool_)
                for turn in sample.turns:
                    sampled[turn.start : turn.stop] = True
                assert np.array_equal(sample.loss_mask, sampled), f"{sample.id}: the loss mask differs from the turns"
                for name, values in sample.token_data.items():
                    assert len(values) == len(sample.token_ids), f"{sample.id}: {name} is not one entry per token"

    def test_only_declared_handles_are_asked(self, make_environment: MakeEnvironment) -> None:
        """Requests go to the handles of the record's ``uses``, and the policy is asked within the run's limits."""
        environment, uses = make_environment(), self.record().uses
        for index, case in enumerate(self.cases):
            _, policy = self._make(environment, case, f"handles-{index}")
            for handle, request in [one for asked in policy.asked.values() for one in asked]:
                assert handle in uses, f"{handle!r} was asked; the record's uses are {', '.join(uses)}"
                assert request.sampling.max_tokens <= TURN_TOKENS, "a turn may be longer than sampling.max_tokens"

    def test_a_rollout_repeats(self, make_environment: MakeEnvironment) -> None:
        """The same order and the same turns give the same rollout, whatever was made before: a resumed run makes it
        again.
        """
        used, fresh = make_environment(), make_environment()
        for index, case in enumerate(self.cases):
            first, _ = self._make(used, case, f"again-{index}")
            for environment in (used, fresh):
                again, _ = self._make(environment, case, f"again-{index}")
                assert _content(again) == _content(first), f"case {index}: another rollout at the second time"

    def test_concurrent_rollouts_are_independent(self, make_environment: MakeEnvironment) -> None:
        """Many rollouts at a time give what each gives alone: keep the state of a rollout in ``rollout``'s own
        variables, not in ``self``.
        """
        environment = make_environment()
        names = [(index, f"with-{index}-{copy}") for copy in range(NUM_TOGETHER) for index in range(len(self.cases))]
        alone = {name: _content(self._make(environment, self.cases[index], name)[0]) for index, name in names}

        async def together() -> list[Rollout]:
            made = [self._rollout(environment, self.cases[index], name)[0] for index, name in names]
            return list(await asyncio.gather(*made))

        for (_, name), rollout in zip(names, self._run(together()), strict=True):
            assert _content(rollout) == alone[name], f"rollout {name} differs beside others"

    def test_the_limit_of_turns_ends_it(self, make_environment: MakeEnvironment) -> None:
        """A rollout that may have no further turn ends with the status ``truncated``: look at ``context.turns_left``.

        An environment that asks all the same loses the rollout (``TurnLimitError``).
        """
        longer = [case for case in self.cases if (case.num_turns or len(case.replies)) > 1]
        if not longer:
            not_applicable("no case has more than one turn")
        environment = make_environment()
        for index, case in enumerate(longer):
            limit = (case.num_turns or len(case.replies)) - 1
            try:
                rollout, _ = self._make(environment, case, f"limit-{index}", max_turns=limit)
            except TurnLimitError as error:
                pytest.fail(f"it asked for turn {limit + 1} of {limit}: {error}")
            assert rollout.status == "truncated", f"the rollout is {rollout.status} after {limit} turns"

    def test_the_limit_of_tokens_ends_it(self, make_environment: MakeEnvironment) -> None:
        """A sequence that outgrows the model ends the rollout, or raises ``BackendError``; it never becomes longer."""
        environment = make_environment()
        for index, case in enumerate(self.cases):
            whole, _ = self._make(environment, case, f"room-{index}")
            longest = max(len(sample.token_ids) for sample in whole.samples)
            for limit in {longest - 1, len(self._prompt(case, "").token_ids) + 1}:
                try:
                    rollout, _ = self._make(environment, case, f"room-{index}-{limit}", max_tokens=limit)
                except BackendError:
                    continue
                for sample in rollout.samples:
                    found = len(sample.token_ids)
                    assert found <= limit, f"{sample.id} has {found} tokens where {limit} are allowed"

    def test_a_lost_generator_is_not_hidden(self, make_environment: MakeEnvironment) -> None:
        """If a request fails, ``rollout`` raises or gives the rollout up (status ``failed``): a rollout with a missing
        turn must not be trained on.
        """
        environment = make_environment()
        for index, case in enumerate(self.cases):
            for at in range(case.num_turns or len(case.replies)):
                try:
                    rollout, _ = self._make(environment, case, f"lost-{index}-{at}", fails_at=at)
                except BackendError:
                    continue
                assert rollout.status == "failed", f"request {at} failed, and the rollout is {rollout.status}"
        self._assert_still_right(environment)

    def test_a_cancelled_rollout_ends(self, make_environment: MakeEnvironment) -> None:
        """A rollout that is cancelled while it waits ends with ``CancelledError``, and later rollouts are right."""
        environment = make_environment()

        async def cancelled() -> bool:
            work, policy = self._rollout(environment, self.cases[0], "gone", holds=asyncio.Event())
            task = asyncio.ensure_future(work)
            while not policy.asked and not task.done():
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            return bool(task.cancelled())

        assert self._run(cancelled()), "the rollout swallowed its cancellation"
        self._assert_still_right(environment)

    def test_odd_turns_do_no_harm(self, make_environment: MakeEnvironment) -> None:
        """Whatever the policy says, the rollout ends, with a result or an exception, and later ones are right."""
        environment = make_environment()
        for index, text in enumerate(("", "\x00\x01", "9" * 400, '{"name": 1', "<" * 300, "(" * 300)):
            case = replace(self.cases[0], replies=(text,))
            try:
                rollout, policy = self._make(environment, case, f"odd-{index}")
            except TimeoutError:
                pytest.fail(f"no end within {self.patience_s:g} s after {text[:20]!r}")
            except Exception:  # it is excluded and counted
                continue
            for sample in rollout.samples:
                self._assert_tokens(sample, policy, rollout.id)
        self._assert_still_right(environment)

    def test_the_process_and_the_prompt_stay_as_they_were(
        self, make_environment: MakeEnvironment, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """A rollout prints nothing to standard output, and changes neither its prompt nor, as in every test, what all
        code of the process shares: global seeds, environment, working directory.
        """
        environment = make_environment()
        with nothing_is_printed(capfd):
            for index, case in enumerate(self.cases):
                prompt = self._prompt(case, f"kept-{index}")
                content = pickle.dumps(prompt)
                self._make(environment, case, f"kept-{index}", prompt=prompt)
                assert pickle.dumps(prompt) == content, "the prompt was changed"

    def test_closing_leaves_nothing(self, make_environment: MakeEnvironment) -> None:
        """``close`` ends every process and thread, removes the files that were written, and is idempotent."""
        with self.nothing_is_left():
            environment = make_environment()
            for index, case in enumerate(self.cases):
                self._make(environment, case, f"last-{index}")
            environment.close()
            environment.close()

    @pytest.fixture
    def make_environment(self) -> Iterator[MakeEnvironment]:
        """A function that builds an environment and sets it up; the fixture closes it after the test."""
        made: list[Environment] = []

        def make() -> Environment:
            environment: Environment = self.build()(self.make_options(), RoleContext("environment"))
            environment.setup()
            made.append(environment)
            return environment

        yield make
        for environment in made:
            environment.close()

    # Inside

    def _tokenizer(self) -> Any:
        if self.tokenizer.endswith(":CharacterTokenizer"):
            return CharacterTokenizer()
        return resolve_import_string(self.tokenizer)()

    def _prompt(self, case: EnvironmentCase, name: str) -> Prompt:
        tokenizer, messages = self._tokenizer(), ({"role": "user", "content": case.prompt},)
        text = case.prompt
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
        return Prompt(name, ids, text, ground_truth=case.ground_truth, messages=messages)

    def _rollout(
        self,
        environment: Environment,
        case: EnvironmentCase,
        name: str,
        *,
        max_turns: int | None = None,
        max_tokens: int = MAX_TOKENS,
        fails_at: int | None = None,
        holds: asyncio.Event | None = None,
        prompt: Prompt | None = None,
    ) -> tuple[Any, ScriptedPolicy]:
        """A coroutine that makes a rollout, and the policy that it asks."""
        tokenizer, prompt = self._tokenizer(), prompt or self._prompt(case, name)
        policy = ScriptedPolicy(tokenizer, case.replies, fails_at, holds)
        order = RolloutOrder(
            name, f"group of {name}", prompt, SamplingParams(TURN_TOKENS), 7, max_tokens, self.patience_s, max_turns
        )
        context = RolloutContext(order, tokenizer, policy, self.record().uses[0])
        return environment.rollout(prompt, context), policy

    def _make(
        self, environment: Environment, case: EnvironmentCase, name: str, **how: Any
    ) -> tuple[Rollout, ScriptedPolicy]:
        async def make() -> tuple[Rollout, ScriptedPolicy]:
            work, policy = self._rollout(environment, case, name, **how)
            return await work, policy

        made: tuple[Rollout, ScriptedPolicy] = self._run(make())
        return made

    def _run(self, work: Any) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, self.patience_s)

        return asyncio.run(bounded())

    def _assert_still_right(self, environment: Environment) -> None:
        case = self.cases[0]
        rollout, _ = self._make(environment, case, "after")
        assert rollout.status == case.status, f"a later rollout is {rollout.status}, not {case.status}"
        self._assert_reward(case, rollout, 0)

    def _assert_reward(self, case: EnvironmentCase, rollout: Rollout, index: int) -> None:
        if case.value is None:
            assert rollout.reward is None, f"case {index} expects no reward, but got {rollout.reward}"
            return
        assert rollout.reward is not None, f"case {index} expects the reward {case.value}, but got none"
        assert rollout.reward.error is None, f"case {index}: {rollout.reward.error}"
        assert type(rollout.reward.value) is float, f"case {index} got a {type(rollout.reward.value).__name__}"
        assert rollout.reward.value == pytest.approx(case.value), f"case {index} got the reward {rollout.reward.value}"

    def _assert_tokens(self, sample: Sample, policy: ScriptedPolicy, rollout: str) -> None:
        ids = sample.token_ids
        said = {completion.request_id: completion for completion in policy.said.get(rollout, ())}
        carried = {request.id: request.prompt_ids for _, request in policy.asked.get(rollout, ())}
        used = Counter(turn.request_id for turn in sample.turns)
        assert sample.turns, f"{sample.id} has no turn of the policy"
        assert max(used.values()) == 1, f"{sample.id} holds a turn twice"
        for turn in sample.turns:
            assert turn.request_id in said, f"{sample.id} holds a turn that the policy did not sample"
            completion = said[turn.request_id]
            found = ids[turn.start : turn.stop]
            assert np.array_equal(found, completion.token_ids), (
                f"{sample.id}: turn {turn.request_id} has the tokens {found.tolist()[:20]}, the policy sampled "
                f"{completion.token_ids.tolist()[:20]}"
            )
            assert np.array_equal(ids[: turn.start], carried[turn.request_id]), (
                f"{sample.id}: turn {turn.request_id} does not follow the tokens that its request carried"
            )
            logprobs = sample.token_data["generator_logprobs"][turn.start : turn.stop]
            assert np.array_equal(logprobs, completion.logprobs), f"{sample.id}: logprobs are not the policy's"
            versions = sample.token_data["policy_version"][turn.start : turn.stop]
            assert set(versions.tolist()) <= {completion.version_spans[0].version}, f"{sample.id}: other versions"


def _content(rollout: Rollout) -> list[Any]:
    """What two equal rollouts have in common."""
    samples = [
        (
            sample.token_ids.tolist(),
            sample.loss_mask.tolist(),
            {name: np.asarray(values).tolist() for name, values in sample.token_data.items()},
            dict(sample.sequence_data),
        )
        for sample in rollout.samples
    ]
    reward = rollout.reward
    return [rollout.status, samples, None if reward is None else (reward.value, reward.components)]
