"""The environment ``acme``."""

from __future__ import annotations

import re

import numpy as np
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Prompt, RewardResult, Rollout, RolloutStatus

from acme_plugin.options import AcmeOptions

_NUMBER = re.compile(r"-?\d{1,15}")
"""Longer numbers are no guesses."""


class AcmeEnvironment:
    """Makes rollouts in which the policy guesses the number in the row's ``ground_truth``.

    Implements ``chatlearn_core.protocols.Environment``. The state of a rollout is in local variables: one object makes
    many rollouts at a time.
    """

    def __init__(self, options: AcmeOptions, context: RoleContext) -> None:
        self.options = options
        self.role = context.role

    def setup(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to release."""

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Sample guesses until one is right, or guesses, turns or tokens are used up.

        Raises:
            ConfigError: the row's ground truth is no number.
        """
        if not isinstance(prompt.ground_truth, int):
            raise ConfigError(
                f"role {self.role!r}, prompt {prompt.id!r}: the ground truth {prompt.ground_truth!r} is not a whole "
                "number; set the column that holds the number as the dataset's answer"
            )
        sequence = context.sequence()
        status: RolloutStatus = "finished"
        guesses = 0
        while True:
            turn = await context.generate(sequence.token_ids)
            sequence.sampled(turn)  # the tokens as they were sampled, never the text encoded again
            guesses += 1
            guess = read_guess(turn.text)
            if guess == prompt.ground_truth or guesses == self.options.max_guesses:
                break
            answer = np.array(context.tokenizer.encode(hint(guess, prompt.ground_truth), add_special_tokens=False))
            if context.turns_left == 0 or len(sequence.token_ids) + len(answer) >= context.max_tokens:
                status = "truncated"
                break
            sequence.observed(answer)
        found = guess == prompt.ground_truth
        value = 1.0 / guesses if found else self.options.missed
        reward = RewardResult(value, components={"accuracy": float(found), "guesses": float(guesses)})
        return context.finished([sequence], status=status, reward=reward)


def read_guess(text: str) -> int | None:
    """The last number of a turn; None if there is none."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None


def hint(guess: int | None, number: int) -> str:
    """What the environment says after a wrong guess."""
    if guess is None:
        return " That is no number. "
    return " Higher. " if guess < number else " Lower. "
