"""Anthropic's messages: requests, responses and streams (``/v1/messages``)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_core.data.format import Message
from chatlearn_gateway.chat import SAMPLING, Begun, ChatRequest, Event, RefusedError, Reply
from chatlearn_gateway.wire import Json, ServedBy, refuse_parameters, sampling_of, text_of_parts

_WITHOUT_EFFECT = ("metadata", "service_tier")


class AnthropicMessage(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessagesRequest(BaseModel):
    """The body of a request. Other parameters are refused unless they have their neutral value."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: list[AnthropicMessage]
    max_tokens: int | None = None
    """Required to sample; absent when tokens are counted."""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None

    def chat(self) -> ChatRequest:
        """The request in the form that all protocols share.

        Raises:
            RefusedError: a parameter, a tool or a content block is not supported.
        """
        refuse_parameters(self.model_extra, (*SAMPLING, *_WITHOUT_EFFECT), {"thinking": ({"type": "disabled"},)})
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RefusedError("invalid", f"max_tokens is {self.max_tokens}; it must be at least 1", "max_tokens")
        choice = (self.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise RefusedError(
                "invalid", f"tool_choice of type {choice!r} is not supported; use 'auto' or 'none'", "tool_choice"
            )
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": text_of_parts(self.system, ("text",))})
        for one in self.messages:
            messages += _messages(one)
        tools = [] if choice == "none" else self.tools or []
        return ChatRequest(
            tuple(messages),
            tuple(map(_tool, tools)),
            max_tokens=self.max_tokens,
            stop=tuple(filter(None, self.stop_sequences or ())),
            streams=bool(self.stream),
            sampling=sampling_of(self.model_extra),
        )


def _messages(given: AnthropicMessage) -> list[Message]:
    """The messages that one message with content blocks stands for: results of tools are messages of their own."""
    if isinstance(given.content, str):
        return [{"role": given.role, "content": given.content}]
    texts: list[str] = []
    calls: list[Json] = []
    results: list[Message] = []
    for block in given.content:
        kind = block.get("type")
        if kind == "tool_use" and given.role == "assistant":
            function = {"name": str(block.get("name", "")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result" and given.role == "user":
            result = text_of_parts(block.get("content"), ("text",))
            results.append({"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            texts.append(text_of_parts([block], ("text",)))
    if given.role == "assistant":
        message: Json = {"role": "assistant", "content": "".join(texts)}
        return [message | {"tool_calls": calls} if calls else message]
    return [*results, {"role": given.role, "content": "".join(texts)}] if texts or not results else results


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise RefusedError(
            "invalid", f"a tool of type {tool.get('type')!r} is not supported; only 'custom' is", "tools"
        )
    function: Json = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def message_body(reply: Reply, served: ServedBy) -> Json:
    """The response to a request that does not stream."""
    content: list[Json] = []
    if reply.content or not reply.tool_calls:
        content.append({"type": "text", "text": reply.content})
    content += [_tool_use(index, reply) for index in range(len(reply.tool_calls))]
    return {
        **_head(reply.number, served),
        "content": content,
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop_string,
        "usage": _usage(reply.begun, len(reply.token_ids)),
    }


class MessageEvents:
    """Implements ``Events``."""

    def __init__(self, served: ServedBy) -> None:
        self._served = served
        self._wrote = False
        """Whether the block of the text, which is the first, has begun."""

    def begun(self, begun: Begun) -> Iterator[Event]:
        message = {**_head(begun.number, self._served), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**message, "usage": _usage(begun, 0)})

    def text(self, text: str) -> Iterator[Event]:
        if not self._wrote:
            self._wrote = True
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def rest(self, reply: Reply) -> Iterator[Event]:
        whole = message_body(reply, self._served)
        for index, block in enumerate(whole["content"]):
            if block["type"] == "text":
                for piece in reply.pieces:
                    yield from self.text(piece.text)
            else:
                yield _event("content_block_start", index=index, content_block={**block, "input": {}})
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event(
            "message_delta",
            delta={"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]},
            usage=whole["usage"],
        )
        yield _event("message_stop")


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}


def _head(number: int, served: ServedBy) -> Json:
    return {
        "id": f"msg_{served.session}_{number}",
        "type": "message",
        "role": "assistant",
        "model": served.model,
    }


def _usage(begun: Begun, num_sampled: int) -> Json:
    return {
        "input_tokens": begun.num_prompt_tokens - begun.num_cached_tokens,
        "cache_read_input_tokens": begun.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def _tool_use(index: int, reply: Reply) -> Json:
    call = reply.tool_calls[index]
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": parsed_arguments(call.arguments)}


def _stop_reason(reply: Reply) -> str:
    if reply.stop_string is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
