"""A conversation of a policy with an environment, in tokens: sampled turns stay as they were sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chatlearn_chat import ChatTemplateRenderer
from chatlearn_chat.prompt_messages import messages_of
from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_chat.turn_reader import ReadTurn, TurnReader
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import BackendError, DataError, ModelError
from chatlearn_core.protocols import RolloutContext
from chatlearn_core.protocols.prompt_renderer import TooLongError
from chatlearn_core.types import Prompt, Rollout, RolloutStatus, TokenIds

PREFIX = "environment/"
"""Of the names in ``sequence_data`` by which an environment counts; the run logs their means."""


class Conversation:
    """One sample: the prompt, sampled turns, and what the environment says between them.

    Args:
        context: of the rollout.
        reader: of the run's tokenizer.
        prompt: of the row. With tools it is rendered again, because the template writes them into it.
        tools: as chat templates take them.
        opening: what the environment says first; appended to the last message of the prompt.

    Raises:
        BackendError: the prompt cannot be rendered.
    """

    def __init__(
        self,
        context: RolloutContext,
        reader: TurnReader,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
    ) -> None:
        self._context = context
        self._reader = reader
        self._tools = tools
        self._messages: list[Message] = [*_messages(prompt, reader.renderer)]
        self._builder = context.sequence()
        self._prompt_ids: TokenIds = prompt.token_ids
        self._end_id: int | None = None
        self.num_turns = 0
        if opening:
            last = self._messages[-1]
            self._messages[-1] = {**last, "content": f"{last['content']}\n\n{opening}".lstrip()}
        if tools or opening:
            try:
                self._prompt_ids = reader.renderer.prompt(reader.for_template(self._messages), tools).token_ids
            except (DataError, ModelError) as error:
                raise BackendError(f"rollout {context.id}: {error}") from error

    async def turn(self) -> ReadTurn:
        """Let the policy sample a turn.

        Raises:
            TurnLimitError, BackendError: see ``RolloutContext.generate``.
        """
        first = self.num_turns == 0
        completion = await self._context.generate(self._prompt_ids if first else self._builder.token_ids)
        if first and completion.prompt_ids is None:
            completion = replace(completion, prompt_ids=self._prompt_ids)
        self._builder.sampled(completion)
        self.num_turns += 1
        turn = self._reader.read(completion, tools=self._tools, in_pieces=False)
        self._end_id = turn.end_id
        self._messages.append(_message_of(turn, self.num_turns))
        return turn

    def respond(self, messages: Sequence[Message]) -> bool:
        """Append what the environment says, and the beginning of the policy's next turn.

        Returns:
            False if there is no room for it and a further token; the conversation is then as before.

        Raises:
            BackendError: the chat template cannot render the messages.
        """
        index = len(self._messages) - 1
        try:
            added = self._reader.renderer.continuation(
                self._reader.for_template([*self._messages, *messages]), index, self._end_id, self._tools
            )
        except TooLongError:
            return False
        except (DataError, ModelError) as error:
            raise BackendError(f"rollout {self._context.id}, after turn {self.num_turns}: {error}") from error
        if len(self._builder.token_ids) + len(added) >= self._context.max_tokens:
            return False
        self._builder.observed(added)
        self._messages += messages
        return True

    def rewarded(self, value: float) -> None:
        """Give the last turn a reward of its own."""
        self._builder.rewarded(value)

    def finished(self, status: RolloutStatus, counts: Mapping[str, float], reward: Any = None) -> Rollout:
        """The rollout.

        Args:
            counts: numbers of this rollout by name; the run logs their means as ``environment/<name>``.
        """
        everything = {"turns": self.num_turns, "truncated": status == "truncated", **counts}
        self._builder.sample.sequence_data.update({PREFIX + name: float(n) for name, n in everything.items()})
        return self._context.finished([self._builder], status=status, reward=reward)


def _messages(prompt: Prompt, renderer: ChatTemplateRenderer) -> tuple[Message, ...]:
    """Raises: BackendError: the prompt is a text that the chat template did not render."""
    messages = messages_of(prompt, renderer)
    if messages is None:
        raise BackendError(
            f"prompt {prompt.id!r} is a plain text that was not rendered by the chat template alone; give the rows "
            "messages, for example [{'role': 'user', 'content': ...}] as prompt"
        )
    return messages


def call_id(turn: int, index: int) -> str:
    """Id of a call, in the form that the strictest templates want: nine letters or digits."""
    return f"{turn:05d}{index:04d}"


def _message_of(turn: ReadTurn, number: int) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call_id(number, index),
                "type": "function",
                "function": {"name": name, "arguments": parsed_arguments(arguments)},
            }
            for index, (name, arguments) in enumerate(turn.calls)
        ]
    return message
