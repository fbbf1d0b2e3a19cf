"""The environment ``agent``: a rollout is one run of an agent that takes the gateway for its model provider."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from chatlearn_chat.prompt_messages import messages_of
from chatlearn_chat.turn_reader import TurnReader, reader_of
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import BackendError, ConfigError, TurnLimitError
from chatlearn_core.protocols import OnTokens, RoleContext, RolloutContext
from chatlearn_core.types import Completion, Prompt, RewardResult, Rollout, RolloutStatus, SamplingParams, TokenIds
from chatlearn_gateway.agents import Agent, AgentCall, CommandAgent, FunctionAgent
from chatlearn_gateway.options import AgentOptions
from chatlearn_gateway.server import Gateway
from chatlearn_gateway.session import Session
from chatlearn_gateway.verifiers_agent import VerifiersAgent

_LOG = logging.getLogger(__name__)


class AgentEnvironment:
    """Runs the agent of the options once for each rollout; see the options."""

    def __init__(self, options: AgentOptions, context: RoleContext) -> None:
        self.options = options
        self._handles = {handle: role for handle, role in context.handles.items() if handle != "policy"}
        self._others: dict[str, TurnReader] = {}
        self._gateway = Gateway(
            model=options.model,
            others=tuple(self._handles),
            host=options.host,
            port=options.port,
            max_request_bytes=options.max_request_bytes,
        )
        self._agent: Agent | None = None
        self._reader: TurnReader | None = None

    def setup(self) -> None:
        """Import the agent and start the server.

        Raises:
            ConfigError: there is no such agent, or two generators have one name.
            ModelError: a generator's model has no tokenizer.
            BackendError: the server does not start.
        """
        options = self.options
        if options.model in self._handles:
            raise ConfigError(
                f"options.model is {options.model!r}, the name of the policy; uses has a generator of this name, too. "
                "Rename one"
            )
        self._others = {
            handle: reader_of(role.tokenizer, max_tokens=role.max_length) for handle, role in self._handles.items()
        }
        if options.function is not None:
            self._agent = FunctionAgent(options.function)
        elif options.verifiers is not None:
            self._agent = VerifiersAgent(options.verifiers, options.verifiers_arguments)
        else:
            assert options.command is not None, "checked by the options"
            self._agent = CommandAgent(options.command)
        self._gateway.start()

    def close(self) -> None:
        """End all sessions and stop the server."""
        self._gateway.close()

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Run the agent with a key of its own; the samples are what the gateway recorded under it.

        Raises:
            BackendError: the agent raised, made no request, or returned no reward although it gives the reward.
            TurnLimitError: it raised after the role's ``max_turns`` were over, and no ``truncated_reward`` is set.
        """
        reader = self._reader_of(context)
        session = self._session(context, reader)
        messages = messages_of(prompt, reader.renderer) or ({"role": "user", "content": prompt.text},)
        key = self._gateway.open(session)
        status: RolloutStatus = "finished"
        result: Any = None
        try:
            result = await self._act(key, prompt, messages)
        except BackendError as error:
            if session.limit is None:
                raise
            status = "truncated"
            if self.options.reward == "agent":
                result = self.options.truncated_reward
                if result is None:
                    kind = TurnLimitError if session.limit.kind == "turn_limit" else BackendError
                    raise kind(f"rollout {context.id}: {session.limit}; then {error}") from error
        finally:
            self._gateway.end(key)
        # Where the requests are: one that the agent did not wait for may be recorded at this moment.
        samples, counts = await self._gateway.call(session.samples), session.counts
        if counts.refused or counts.disconnected:
            _LOG.info(
                "rollout %s: of %d requests %d were refused and %d were not waited for",
                context.id, counts.requests, counts.refused, counts.disconnected,
            )  # fmt: skip
        if not samples:
            raise BackendError(
                f"rollout {context.id}: the agent ended without a turn of the model; it must use the base_url and the "
                f"api_key that it is given (it made {counts.requests} requests)"
            )
        reward = self._reward(context.id, result) if self.options.reward == "agent" else None
        order = context.order
        return Rollout(order.id, order.group_id, order.example, samples, status, reward)

    async def _act(self, key: str, prompt: Prompt, messages: Sequence[Message]) -> Any:
        assert self._agent is not None, "set up before it is used"
        example = {
            "id": prompt.id,
            "messages": [dict(message) for message in messages],
            "text": prompt.text,
            "ground_truth": prompt.ground_truth,
            "columns": dict(prompt.columns),
        }
        return await self._agent.act(AgentCall(f"{self._gateway.url}/v1", key, self.options.model, example))

    def _session(self, context: RolloutContext, reader: TurnReader) -> Session:
        here = asyncio.get_running_loop()

        async def generate(
            token_ids: TokenIds, sampling: SamplingParams, role: str | None, on_tokens: OnTokens | None
        ) -> Completion:
            """On the environment's loop, from the server's."""
            there = asyncio.get_running_loop()

            def told(start: int, token_ids: list[int]) -> None:
                assert on_tokens is not None, "otherwise not called"
                with contextlib.suppress(RuntimeError):  # the server's loop has ended
                    there.call_soon_threadsafe(on_tokens, start, token_ids)

            sampled = context.generate(
                token_ids, sampling=sampling, role=role, on_tokens=None if on_tokens is None else told
            )
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sampled, here))

        overrides = self.options.request_sampling == "run"
        return Session(context, reader, generate, self._others, overrides_sampling=overrides)

    def _reader_of(self, context: RolloutContext) -> TurnReader:
        if self._reader is None or self._reader.renderer.max_tokens != context.max_tokens:
            written = self.options.tool_calls
            self._reader = reader_of(
                context.tokenizer, None if written == "auto" else written, max_tokens=context.max_tokens
            )
        return self._reader

    def _reward(self, rollout_id: str, result: Any) -> RewardResult:
        """The reward that an agent returned."""
        if isinstance(result, RewardResult):
            return result
        fields = result if isinstance(result, Mapping) else {"reward": result}
        value = fields.get("reward")
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BackendError(
                f"rollout {rollout_id}: the agent returned {result!r:.80}; with options.reward=agent it returns a "
                "finite number, or a mapping with one as 'reward'. Set options.reward=flow to let a reward role judge"
            )
        parts = {
            str(name): float(part)
            for name, part in fields.items()
            if name != "reward" and isinstance(part, int | float) and math.isfinite(part)
        }
        return RewardResult(float(value), components=parts)
