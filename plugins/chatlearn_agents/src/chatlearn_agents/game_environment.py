"""The environment ``game``: the policy reads observations and writes actions until the game ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from chatlearn_agents.conversation import Conversation
from chatlearn_agents.game import (
    Game,
    GymnasiumGame,
    InvalidActionError,
    OpenEnvGame,
    action_of,
    checked_reward,
    game_maker,
    observation_text,
)
from chatlearn_agents.options import GameOptions
from chatlearn_agents.shortened import shortened
from chatlearn_agents.tool_threads import ToolThreads
from chatlearn_chat.turn_reader import TurnReader, reader_of
from chatlearn_core.exceptions import BackendError, ConfigError
from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Prompt, RewardResult, Rollout, RolloutStatus
from chatlearn_core.types.keyed_seed import keyed_seed

_LOG = logging.getLogger(__name__)
_SEEDS = 2**31
"""Gymnasium's generators take seeds below it."""
ResultT = TypeVar("ResultT")


class GameEnvironment:
    """Plays one game a rollout; the reward is the sum of the game's rewards, or each turn has its own. See the options.

    All rollouts of a prompt begin with the same state: the game's seed is the row's column ``seed``, or keyed by the
    example's id.
    """

    def __init__(self, options: GameOptions, context: RoleContext) -> None:
        self.options = options
        self._threads = ToolThreads(options.make)
        self._reader: TurnReader | None = None

    def setup(self) -> None:
        """Import what the options name.

        Raises:
            ConfigError: something is missing or wrong.
        """
        self._make = game_maker(self.options)
        self._text_of = observation_text(self.options)
        self._action_of = action_of(self.options)

    def close(self) -> None:
        """Nothing to release: each rollout closes its game."""

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Play until the game ends, or turns or tokens are used up.

        Raises:
            BackendError: the game raised, hung or gave no finite reward, or the prompt cannot be rendered.
        """
        if self._reader is None:
            self._reader = reader_of(context.tokenizer, max_tokens=context.max_tokens)
        kind = GymnasiumGame if self.options.api == "gymnasium" else OpenEnvGame
        game: Game = kind(await self._bounded(self._threads.run(self._make), context, "make"), self._threads)
        try:
            return await self._played(game, prompt, context, self._reader)
        finally:
            try:
                await self._bounded(game.close(), context, "close")
            except BackendError as error:  # the rollout is made
                _LOG.warning("%s", error)

    async def _played(self, game: Game, prompt: Prompt, context: RolloutContext, reader: TurnReader) -> Rollout:
        observation = await self._bounded(game.reset(self._seed(prompt, context)), context, "reset")
        conversation = Conversation(context, reader, prompt, opening=await self._shown(game, observation, context))
        status: RolloutStatus = "finished"
        total, invalid, ended, by_turn = 0.0, 0, False, self.options.rewards == "turns"
        while True:
            turn = await conversation.turn()
            try:
                action = self._action_of(game.made, turn.content)
            except InvalidActionError:
                invalid += 1
                gained = self.options.invalid_reward
                answer = self.options.invalid_message
            else:
                step = await self._bounded(game.step(action), context, "step")
                gained = self._reward(step.reward, context)
                ended, status = step.ended, "truncated" if step.truncated else "finished"
                answer = "" if ended else await self._shown(game, step.observation, context)
            total += gained
            if by_turn:
                conversation.rewarded(gained)
            if ended:
                break
            over = conversation.num_turns >= self.options.max_steps or context.turns_left == 0
            if over or not conversation.respond([{"role": "user", "content": answer}]):
                status = "truncated"
                break
        counts = {"invalid_actions": float(invalid), "ended": float(ended)}
        return conversation.finished(status, counts, RewardResult(0.0 if by_turn else total, {"return": total}))

    async def _shown(self, game: Game, observation: object, context: RolloutContext) -> str:
        text = await self._bounded(self._threads.run(lambda: self._text_of(game.made, observation)), context, "render")
        return shortened(text, self.options.max_observation_chars)

    def _seed(self, prompt: Prompt, context: RolloutContext) -> int:
        given = prompt.columns.get("seed")
        if given is None:
            return keyed_seed(0, "game", context.order.example.id) % _SEEDS
        if isinstance(given, bool) or not isinstance(given, int):
            raise BackendError(f"rollout {context.id}: column seed of the row is {given!r:.80}; it must be an integer")
        return given

    def _reward(self, value: float, context: RolloutContext) -> float:
        try:
            return checked_reward(value)
        except ValueError as error:
            raise BackendError(f"rollout {context.id}: {error}") from error

    async def _bounded(self, call: Awaitable[ResultT], context: RolloutContext, what: str) -> ResultT:
        """Raises BackendError: the game raised, or did not answer in time."""
        name, limit = self.options.make, asyncio.timeout(self.options.call_timeout_s)
        try:
            async with limit:
                return await call
        except ConfigError:
            raise
        except Exception as error:  # a user's game may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                words = f"did not end within {self.options.call_timeout_s:g} s (options.call_timeout_s)"
            else:
                words = f"raised {type(error).__name__}: {error}"
            raise BackendError(f"rollout {context.id}: {what} of the game {name!r} {words}") from error
