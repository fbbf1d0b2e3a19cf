"""Environments: rollouts of one or more turns, in which a policy samples and an environment responds.

Environments work on tokens: they append token ids, and the loss mask is True only for tokens that the policy sampled.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from chatlearn_core.exceptions import BackendError, ContractError, TurnLimitError
from chatlearn_core.protocols.generator import OnTokens
from chatlearn_core.types import (
    Completion,
    Example,
    GenerateRequest,
    Media,
    Prompt,
    RewardResult,
    Rollout,
    RolloutStatus,
    Sample,
    SamplingParams,
    TokenIds,
    sample_from_completion,
    sample_with_tokens,
    sample_with_turn,
)
from chatlearn_core.types.keyed_seed import keyed_seed


class GenerateFor(Protocol):
    """Samples for an environment."""

    def __call__(
        self, handle: str, request: GenerateRequest, on_tokens: OnTokens | None = None, /
    ) -> Awaitable[Completion]:
        """The completion of the generator role with this handle (``uses`` of the environment role).

        Called: by an environment, through its ``RolloutContext``; in its worker; once for each request.

        Args:
            on_tokens: see ``RolloutContext.generate``.
        """


@dataclass(slots=True, frozen=True, eq=False)
class RolloutOrder:
    """Order for one rollout by an environment. Picklable."""

    id: str
    group_id: str
    example: Example
    sampling: SamplingParams
    """The run's sampling parameters; ``max_tokens`` bounds each turn."""
    seed: int
    """Keys all randomness in the rollout."""
    max_tokens: int
    """Maximum length of the rollout's sequences, prompt included."""
    timeout_s: float
    max_turns: int | None = None
    """Maximum number of turns that the policy may sample in the rollout; None: no limit."""


class SequenceBuilder:
    """Builds one training sample: the prompt, then turns that the policy sampled and tokens that it observed.

    Example:
        sequence = context.sequence()
        sequence.sampled(await context.generate(sequence.token_ids))
        sequence.observed(context.tokenizer.encode(" wrong, try again:"))
        sequence.sampled(await context.generate(sequence.token_ids))
        return context.finished([sequence])
    """

    def __init__(self, sample_id: str, group_id: str, prompt: Prompt, example_id: str) -> None:
        self._sample = Sample(
            sample_id,
            group_id,
            prompt,
            prompt.token_ids,
            np.zeros(len(prompt.token_ids), np.bool_),
            example_id=example_id,
            media=prompt.media,
        )
        self._rewards: dict[int, float] = {}
        """Position of a turn's last token -> the turn's reward."""

    @property
    def token_ids(self) -> TokenIds:
        """[T] the sequence so far, which the next request continues."""
        return self._sample.token_ids

    @property
    def sample(self) -> Sample:
        """The sample so far."""
        return self._sample

    def sampled(self, completion: Completion, *, generator: str = "") -> None:
        """Append a completion that was sampled after ``token_ids``."""
        sample = self._sample
        if sample.turns:
            self._sample = sample_with_turn(sample, completion, generator=generator)
        else:
            self._sample = sample_from_completion(
                sample.id, sample.group_id, sample.prompt, completion, example_id=sample.example_id, generator=generator
            )

    def observed(self, token_ids: Any) -> None:
        """Append tokens that the policy did not sample and is not trained on: a tool's answer, the next question.

        Raises:
            ContractError: nothing has been sampled yet; such tokens belong to the prompt.
        """
        if not self._sample.turns:
            raise ContractError(f"sample {self._sample.id!r}: tokens were observed before the policy sampled any")
        self._sample = sample_with_tokens(self._sample, np.asarray(token_ids, np.int64))

    def rewarded(self, value: float) -> None:
        """Give the last turn a reward of its own, besides that of the rollout. Those of one turn add up; 0 counts, too.

        They become the sample's rewards of steps (``RewardResult.step_ends``), each at its turn's last token.

        Raises:
            ContractError: nothing has been sampled yet, or the value is not finite.
        """
        turn = self._sample.last_turn
        if turn is None or not math.isfinite(value):
            problem = "nothing was sampled yet" if turn is None else "a reward must be finite"
            raise ContractError(f"sample {self._sample.id!r} cannot be rewarded by {value!r}: {problem}")
        self._rewards[turn.stop - 1] = self._rewards.get(turn.stop - 1, 0.0) + float(value)

    def finished(self, reward: RewardResult | None = None) -> Sample:
        """The sample, with the rewards of its turns beside ``reward``, that of the rollout."""
        sample = self._sample
        if not self._rewards or (reward is not None and reward.error is not None):
            return sample
        ends = np.array(list(self._rewards), np.int64) - sample.num_prompt_tokens
        values = np.zeros(sample.num_completion_tokens, np.float32)
        values[ends] = list(self._rewards.values())
        return replace(sample, reward=replace(reward or RewardResult(0.0), token_values=values, step_ends=ends))


@dataclass(slots=True, eq=False)
class RolloutContext:
    """The tools of an environment for making one rollout."""

    order: RolloutOrder
    tokenizer: Any
    """Tokenizer of the run's model: Hugging Face's or one with its interface."""
    generate_for: GenerateFor
    policy: str = "policy"
    """Handle of the generator whose tokens are trained on."""
    _num_calls: int = field(default=0, init=False)
    _num_turns: int = field(default=0, init=False)

    @property
    def id(self) -> str:
        """Id of the rollout; unique in a run."""
        return self.order.id

    @property
    def sampling(self) -> SamplingParams:
        """Of the run."""
        return self.order.sampling

    @property
    def max_tokens(self) -> int:
        """Maximum length of a sequence, prompt included."""
        return self.order.max_tokens

    @property
    def turns_left(self) -> int | None:
        """Number of turns that the policy may still sample in this rollout; None: no limit.

        An environment that has more to ask ends its rollout at 0:
        ``return context.finished([sequence], status="truncated")``.
        """
        return None if self.order.max_turns is None else self.order.max_turns - self._num_turns

    async def generate(
        self,
        token_ids: TokenIds,
        *,
        role: str | None = None,
        sampling: SamplingParams | None = None,
        media: tuple[Media, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample a completion of these tokens.

        Args:
            token_ids: [P] the whole sequence so far.
            role: a handle of ``uses``; by default the policy.
            sampling: by default the run's. Its seed is replaced: by the rollout's in the first call, later by one keyed
                by it and the number of the call.
            media: the media that the tokens refer to.
            on_tokens: called on the environment's event loop with tokens as they are sampled, if the generator streams
                (``GeneratorSpec.streaming``); otherwise never. If the request is repeated or resumed, calls may begin
                again at an earlier position. What counts is the completion.

        Raises:
            TurnLimitError: the policy has sampled all the turns that the rollout may have.
            BackendError: the sequence has reached its maximum length, or the request failed.
        """
        handle = role or self.policy
        if handle == self.policy and self.turns_left == 0:
            raise TurnLimitError(
                f"rollout {self.id} asked for turn {self._num_turns + 1}, but may have {self.order.max_turns} "
                "(max_turns of its environment role). Raise the limit, or let the environment end the rollout with "
                'status="truncated" when context.turns_left is 0'
            )
        room = self.max_tokens - len(token_ids)
        if room < 1:
            raise BackendError(
                f"rollout {self.id}: a sequence has {len(token_ids)} tokens, but the maximum of the run is "
                f"{self.max_tokens} (model.max_length): there is no room for a turn"
            )
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._num_turns += handle == self.policy
        wanted = sampling or self.sampling
        seed = keyed_seed(self.order.seed, "turn", number) if number else self.order.seed  # as in generator.generate
        own = replace(wanted, seed=seed, max_tokens=min(wanted.max_tokens, room))
        request = GenerateRequest(f"{self.id}/{number}", token_ids, own, self.order.group_id, media=media)
        return await self.generate_for(handle, request, on_tokens)

    def sequence(self, suffix: str = "") -> SequenceBuilder:
        """A builder for a sample that begins with the prompt.

        Args:
            suffix: appended to the rollout's id; must differ between the samples of a rollout.
        """
        order = self.order
        return SequenceBuilder(f"{order.id}{suffix}", order.group_id, order.example.prompt, order.example.id)

    def finished(
        self,
        sequences: list[SequenceBuilder],
        *,
        status: RolloutStatus = "finished",
        reward: RewardResult | None = None,
    ) -> Rollout:
        """The rollout made of these sequences; reward roles judge the first one, and replace what is given here.

        Args:
            reward: of the whole rollout. All its sequences have it, except those that have one of their own
                (``sequence.sample.reward``).
        """
        order = self.order
        samples = [sequence.finished(sequence.sample.reward or reward) for sequence in sequences]
        return Rollout(order.id, order.group_id, order.example, samples, status, reward)


@runtime_checkable
class Environment(Protocol):
    """Makes rollouts. Built as ``factory(options, RoleContext)``; one object makes many concurrently, on an event loop
    of its own.
    """

    def setup(self) -> None:
        """Load what the environment needs. Called once, before any rollout, in the process that hosts it.

        Called: before any rollout; in each worker of the environment; once.
        """

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Make one rollout: let the policy sample, respond, and repeat; return ``context.finished(...)``.

        An exception excludes the rollout; it is counted, and the run continues. A run that resumes makes unfinished
        rollouts again and answers the requests that they had made: where the environment depends on the prompt and
        ``context.order.seed`` alone, it goes on in the middle of a conversation.

        Called: for each rollout; on an event loop of its own in each worker of the environment; once per rollout.
        """

    def close(self) -> None:
        """Release everything. Safe to call twice.

        Called: last; in each worker of the environment; once or twice.
        """
