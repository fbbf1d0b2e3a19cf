"""The environment ``tools``: the policy calls tools, sees their results, and goes on until a turn has no call."""

from __future__ import annotations

import logging
from collections import Counter

from chatlearn_agents.conversation import Conversation, call_id
from chatlearn_agents.options import ToolsOptions
from chatlearn_agents.toolbox import Toolbox, ToolResult
from chatlearn_chat.tool_calls import FORMATS
from chatlearn_chat.turn_reader import ReadTurn, TurnReader, reader_of
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.protocols import RoleContext, RolloutContext
from chatlearn_core.types import Prompt, Rollout, RolloutStatus

_LOG = logging.getLogger(__name__)
_COUNTED = {
    "unknown_tool": "unknown_tools",
    "bad_arguments": "bad_arguments",
    "failed": "tool_errors",
    "timed_out": "tool_timeouts",
    "refused": "refused_calls",
}
"""Outcome of a call -> name of its count."""
COUNTS = ("tool_calls", *_COUNTED.values(), "malformed_calls", "truncated_results")
"""What each rollout counts; every sample of a step has all of them."""
_MALFORMED = (
    "error: the tool call cannot be read. It must have the tool's name and its arguments in the form that the tools "
    "were introduced with, and nothing may follow it"
)


class ToolEnvironment:
    """Makes rollouts with tool calls; see the options."""

    def __init__(self, options: ToolsOptions, context: RoleContext) -> None:
        self.options = options
        key = f"roles.{context.role}.options.tools"
        sources = [(f"{key}.{index}", choice.source()) for index, choice in enumerate(options.tools)]
        self._toolbox = Toolbox(sources, options)
        self._reader: TurnReader | None = None

    def setup(self) -> None:
        """Open the tools.

        Raises:
            ConfigError: a tool is missing or wrong.
            BackendError: a server of tools does not start.
        """
        try:
            self._toolbox.open()
        except BaseException:
            self._toolbox.close()
            raise

    def close(self) -> None:
        """Close the tools."""
        self._toolbox.close()

    async def rollout(self, prompt: Prompt, context: RolloutContext) -> Rollout:
        """Sample turns and answer their calls. What goes wrong in a call is said to the policy and counted.

        The rollout is truncated if a turn is cut by its limit, or if turns or tokens are used up before the policy saw
        the results of its calls.

        Raises:
            ConfigError: the format of tool calls is unknown.
            BackendError: the prompt cannot be rendered or has no room, or the generator failed.
        """
        reader = self._reader_of(context)
        conversation = Conversation(context, reader, prompt, self._toolbox.for_template())
        counts = Counter(dict.fromkeys(COUNTS, 0))
        status: RolloutStatus = "finished"
        while True:
            turn = await conversation.turn()
            if turn.end_id is None and turn.stop_string is None:  # a limit on tokens cut it
                status = "truncated"
                break
            if not turn.calls and not turn.attempted_call:
                break
            if context.turns_left == 0:
                status = "truncated"
                break
            if not conversation.respond(await self._answers(turn, conversation.num_turns, counts)):
                status = "truncated"
                break
        return conversation.finished(status, counts)

    async def _answers(self, turn: ReadTurn, number: int, counts: Counter[str]) -> list[Message]:
        """The messages with which the tools answer a turn."""
        if not turn.calls:
            counts["malformed_calls"] += 1
            assert self._reader is not None, "it has read the turn"
            if FORMATS[self._reader.written].error_role == "user":
                return [{"role": "user", "content": _MALFORMED}]
            return [{"role": "tool", "content": _MALFORMED, "name": "error", "tool_call_id": call_id(number, 0)}]
        results = await self._toolbox.answer(turn.calls)
        for result in results:
            _count(result, counts)
        return [
            {"role": "tool", "content": result.text, "name": name, "tool_call_id": call_id(number, index)}
            for index, ((name, _), result) in enumerate(zip(turn.calls, results, strict=True))
        ]

    def _reader_of(self, context: RolloutContext) -> TurnReader:
        if self._reader is None:
            written = self.options.tool_calls
            reader = reader_of(context.tokenizer, None if written == "auto" else written, max_tokens=context.max_tokens)
            if reader.written == "none":
                raise ConfigError(
                    "the model's chat template writes tool calls in no known format, so its calls cannot be read. Use "
                    f"a model with one of {', '.join(name for name in FORMATS if name != 'none')}, or set "
                    "options.tool_calls of the environment if the model has learned one that its template does not show"
                )
            if not reader.style.introduces_tools:
                _LOG.warning(
                    "the model's chat template does not write the tools into the prompt; describe them in the messages "
                    "of the rows, in the form that the model knows"
                )
            self._reader = reader
        return self._reader


def _count(result: ToolResult, counts: Counter[str]) -> None:
    counts["tool_calls"] += 1
    counts["truncated_results"] += result.truncated
    if result.outcome in _COUNTED:
        counts[_COUNTED[result.outcome]] += 1
