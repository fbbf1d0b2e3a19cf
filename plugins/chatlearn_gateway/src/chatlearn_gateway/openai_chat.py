"""OpenAI's chat completions: requests, responses and streams (``/v1/chat/completions``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_gateway.chat import SAMPLING, Begun, ChatRequest, Event, RefusedError, Reply
from chatlearn_gateway.wire import Json, ServedBy, refuse_parameters, sampling_of, text_of_parts

_WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning_effort", "safety_identifier", "service_tier",
    "store", "user", "verbosity",
)  # fmt: skip


class Function(BaseModel):
    """A function of a tool, or a call of it."""

    model_config = ConfigDict(extra="ignore")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str = "{}"


class Tool(BaseModel):
    """A tool, or a call of one."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    id: str | None = None
    function: Function


class ChatMessage(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Tool] | None = None
    tool_call_id: str | None = None


class StreamOptions(BaseModel):
    """What a stream contains."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class ChatCompletionRequest(BaseModel):
    """The body of a request. Other parameters are refused unless they have their neutral value."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None

    def chat(self) -> ChatRequest:
        """The request in the form that all protocols share.

        Raises:
            RefusedError: a parameter is not supported.
        """
        neutral: dict[str, Sequence[Any]] = {
            "n": (1,),
            "top_logprobs": (0,),
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "logit_bias": ({},),
            "response_format": ({"type": "text"},),
            "modalities": (["text"],),
        }
        refuse_parameters(self.model_extra, (*SAMPLING, *_WITHOUT_EFFECT), neutral)
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if most is not None and most < 1:
            raise RefusedError("invalid", f"max_tokens is {most}; it must be at least 1", "max_tokens")
        tools = self.tools or []
        if self.tool_choice == "none":
            tools = []
        elif self.tool_choice not in (None, "auto"):
            raise RefusedError(
                "invalid", f"tool_choice {self.tool_choice!r} is not supported; use 'auto' or 'none'", "tool_choice"
            )
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return ChatRequest(
            messages=tuple(map(_message, self.messages)),
            tools=tuple(
                {"type": "function", "function": one.function.model_dump(exclude_none=True, exclude={"arguments"})}
                for one in tools
            ),
            max_tokens=most,
            stop=tuple(filter(None, stop)),
            logprobs=bool(self.logprobs),
            streams=bool(self.stream),
            sampling=sampling_of(self.model_extra),
        )


def _message(given: ChatMessage) -> Mapping[str, Any]:
    role = "system" if given.role == "developer" else given.role
    message: dict[str, Any] = {"role": role, "content": text_of_parts(given.content, ("text",))}
    if given.name is not None:
        message["name"] = given.name
    if given.tool_call_id is not None:
        message["tool_call_id"] = given.tool_call_id
    if given.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)},
            }
            for call in given.tool_calls
        ]
    return message


def completion_body(reply: Reply, request: ChatCompletionRequest, served: ServedBy) -> Json:
    """The response to a request that does not stream."""
    message: Json = {
        "role": "assistant",
        "content": reply.content or (None if reply.tool_calls else ""),
        "refusal": None,
    }
    if reply.tool_calls:
        message["tool_calls"] = [_call(index, reply) for index in range(len(reply.tool_calls))]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reply.finish,
        "logprobs": _logprobs(reply, 0, len(reply.token_ids)) if request.logprobs else None,
    }
    return {**_head(reply.number, served, "chat.completion"), "choices": [choice], "usage": usage(reply)}


class CompletionEvents:
    """Implements ``Events``; ``[DONE]`` follows them."""

    def __init__(self, request: ChatCompletionRequest, served: ServedBy) -> None:
        self._request = request
        self._served = served
        self._head: Json = {}

    def begun(self, begun: Begun) -> Iterator[Event]:
        self._head = _head(begun.number, self._served, "chat.completion.chunk")
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, text: str) -> Iterator[Event]:
        yield self._chunk({"content": text})

    def rest(self, reply: Reply) -> Iterator[Event]:
        with_logprobs = self._request.logprobs
        for piece in reply.pieces:
            if piece.text or with_logprobs:
                logprobs = _logprobs(reply, *piece.tokens) if with_logprobs else None
                yield self._chunk({"content": piece.text}, logprobs=logprobs)
        for index in range(len(reply.tool_calls)):
            yield self._chunk({"tool_calls": [{"index": index, **_call(index, reply)}]})
        yield self._chunk({}, finish=reply.finish)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield "", {**self._head, "choices": [], "usage": usage(reply)}

    def _chunk(self, delta: Json, *, finish: str | None = None, logprobs: Json | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return "", {**self._head, "choices": [choice]}


def usage(reply: Reply) -> Json:
    """Numbers of tokens."""
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": len(reply.token_ids),
        "total_tokens": reply.num_prompt_tokens + len(reply.token_ids),
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
    }


def token_logprobs(reply: Reply, start: int, stop: int) -> list[Json]:
    """Logprobs of the sampled tokens [start, stop). A token with part of a character has no bytes."""
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(reply.token_texts[start:stop], reply.logprobs[start:stop], strict=True)
    ]


def _logprobs(reply: Reply, start: int, stop: int) -> Json:
    return {"content": token_logprobs(reply, start, stop), "refusal": None}


def _call(index: int, reply: Reply) -> Json:
    call = reply.tool_calls[index]
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(number: int, served: ServedBy, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{served.session}-{number}",
        "object": kind,
        "created": served.time_s,
        "model": served.model,
    }
