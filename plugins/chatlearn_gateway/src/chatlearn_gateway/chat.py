"""What the three protocols have in common: a request, the reply to it, and why a request is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from chatlearn_chat.turn_reader import TextPiece
from chatlearn_core.data.format import Message

RefusalKind = Literal[
    "authentication", "context_length", "failed", "invalid", "model", "not_found", "over", "too_large", "turn_limit"
]
FinishedBy = Literal["stop", "length", "tool_calls"]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Parameters of a request that change the distribution or the draw of its answer."""
STATUS: Mapping[RefusalKind, int] = {
    "authentication": 401,
    "context_length": 400,
    "failed": 500,
    "invalid": 400,
    "model": 404,
    "not_found": 404,
    "over": 403,
    "too_large": 413,
    "turn_limit": 400,
}
"""HTTP status of each kind. Clients repeat 408, 409, 429 and 5xx, and nothing else."""


class RefusedError(Exception):
    """A request is not answered.

    Args:
        kind: determines the status, and the type of the error in each protocol.
        message: for the agent's author.
        parameter: the parameter of the request that is wrong.
    """

    def __init__(self, kind: RefusalKind, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.parameter = parameter

    @property
    def status(self) -> int:
        """HTTP status."""
        return STATUS[self.kind]


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """One request, whichever protocol it came by."""

    messages: tuple[Message, ...]
    """As chat templates take them: roles ``system``, ``user``, ``assistant``, ``tool``; contents are texts; the
    ``arguments`` of tool calls are objects."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """``{"type": "function", "function": {"name", "description", "parameters"}}``."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    streams: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of ``SAMPLING`` that the request sets."""
    other_model: str | None = None
    """Handle of the generator that is asked, if it is not the policy."""

    @property
    def num_characters(self) -> int:
        """Length of the messages and tools, as far as they are long."""
        calls = (call for message in self.messages for call in message.get("tool_calls") or ())
        texts = (message["content"] for message in self.messages)
        return sum(map(len, texts)) + sum(len(str(one)) for one in (*calls, *self.tools))


@dataclass(slots=True, frozen=True)
class Begun:
    """What is known of a turn when its first text is."""

    number: int
    """Of the request in its session, from 0."""
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """0 while the turn is sampled."""


OnText = Callable[[Begun, str], None]
"""Called with further text of a turn while it is sampled. All texts together are the beginning of its content."""


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    id: str
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(slots=True, frozen=True)
class Reply:
    """The policy's turn. It is recorded for training when ``commit`` is called, just before the client has all of it.

    All of ``token_texts``, ``token_ids`` and ``logprobs`` have length C, the number of sampled tokens.
    """

    number: int
    """Of the request in its session, from 0."""
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: FinishedBy
    stop_string: str | None
    """The stop string that ended the turn; ``content`` ends before it."""
    num_prompt_tokens: int
    num_cached_tokens: int
    token_ids: Sequence[int]
    token_texts: Sequence[str]
    logprobs: Sequence[float]
    pieces: tuple[TextPiece, ...]
    """``content`` in parts, for a request that streams; otherwise empty. Where parts were sent while the turn was
    sampled, the rest is one part, with all tokens."""
    end_id: int | None
    """The sampled token that ended the turn; None if a limit or a stop string did."""
    commit: Callable[[], None] = lambda: None
    withdraw: Callable[[], None] = lambda: None
    """Called if the client left before it had the whole turn, committed or not: excludes the turn from training."""

    @property
    def begun(self) -> Begun:
        """What a stream begins with."""
        return Begun(self.number, self.num_prompt_tokens, self.num_cached_tokens)


Event = tuple[str, dict[str, Any]]
"""(event name, data) of a server-sent event."""


class Events(Protocol):
    """The events of one stream, in the form of a protocol: ``begun``, then ``text`` for text that is sent while the
    turn is sampled, then ``rest``; each at most once but ``text``.
    """

    def begun(self, begun: Begun) -> Iterator[Event]:
        """The first events."""

    def text(self, text: str) -> Iterator[Event]:
        """Further text."""

    def rest(self, reply: Reply) -> Iterator[Event]:
        """The pieces of the reply, its calls, and the end."""


def reply_message(reply: Reply, arguments_of: Callable[[str], Any]) -> Message:
    """The reply as the message that a client sends back in its next request."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_of(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    return message
