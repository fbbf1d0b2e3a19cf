"""The environment ``correction``: the policy answers, and tries again after a wrong answer."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from chatlearn_agents.conversation import Conversation
from chatlearn_agents.options import CorrectionOptions
from chatlearn_agents.tool_threads import ToolThreads
from chatlearn_chat.turn_reader import TurnReader, reader_of
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Prompt, RewardResult, Rollout, RolloutStatus

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number_equals(text: str, ground_truth: Any) -> bool:
    """Whether the last number of a turn is the ground truth; thousands separators do not count.

    Raises:
        ValueError: the ground truth is no number.
    """
    try:
        wanted = Decimal(str(ground_truth).replace(",", "").strip())
    except InvalidOperation as error:
        raise ValueError(f"the ground truth {ground_truth!r:.80} is no number; set options.check") from error
    found = _NUMBER.findall(text)
    return bool(found) and Decimal(found[-1].replace(",", "")) == wanted


class CorrectionEnvironment:
    """Makes rollouts of one or more attempts and judges them; see the options."""

    def __init__(self, options: CorrectionOptions, context: RoleContext) -> None:
        self.options = options
        self._check: Callable[[str, Any], Any] = last_number_equals
        self._threads = ToolThreads(options.check)
        self._reader: TurnReader | None = None

    def setup(self) -> None:
        """Import the check.

        Raises:
            ConfigError: there is no such function, or it does not take two arguments.
        """
        path = self.options.check
        if path == "last_number":
            return
        try:
            function = resolve_import_string(path)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"options.check {path!r} cannot be imported: {error}") from error
        try:
            inspect.signature(function).bind("", None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"options.check {path!r} cannot be called with the text of a turn and the ground truth: {error}"
            ) from error
        self._check = function

    def close(self) -> None:
        """Nothing to release."""

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Sample attempts until one is right, or attempts, turns or tokens are used up.

        Raises:
            BackendError: the check raised or returned no number, or the generator failed.
        """
        options = self.options
        if self._reader is None:
            self._reader = reader_of(context.tokenizer, max_tokens=context.max_tokens)
        conversation = Conversation(context, self._reader, prompt)
        status: RolloutStatus = "finished"
        while True:
            turn = await conversation.turn()
            right = await self._judged(turn.content, prompt, context)
            attempts = conversation.num_turns
            if right or attempts == options.max_attempts:
                break
            again = {"role": "user", "content": options.message}
            if context.turns_left == 0 or not conversation.respond([again]):
                status = "truncated"
                break
        value = options.correct * options.discount ** (attempts - 1) if right else options.incorrect
        first = float(right and attempts == 1)
        reward = RewardResult(value, components={"accuracy": float(right), "first_attempt": first})
        return conversation.finished(status, {}, reward)

    async def _judged(self, text: str, prompt: Prompt, context: RolloutContext) -> bool:
        try:
            verdict = await self._threads.run(lambda: self._check(text, prompt.ground_truth))
        except Exception as error:  # a user's function may raise anything
            raise BackendError(f"rollout {context.id}: options.check raised {type(error).__name__}: {error}") from error
        if not isinstance(verdict, bool | int | float) or not math.isfinite(verdict):
            raise BackendError(
                f"rollout {context.id}: options.check {self.options.check!r} returned {verdict!r:.80}; it returns "
                "whether the turn is right, or a number that is at least 0.5 if it is"
            )
        return verdict >= 0.5
