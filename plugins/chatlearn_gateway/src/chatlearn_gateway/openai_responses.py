"""OpenAI's responses: requests, responses and streams (``/v1/responses``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_core.data.format import Message
from chatlearn_gateway.chat import SAMPLING, Begun, ChatRequest, Event, RefusedError, Reply
from chatlearn_gateway.openai_chat import token_logprobs
from chatlearn_gateway.wire import Json, ServedBy, refuse_parameters, sampling_of, text_of_parts

_WITHOUT_EFFECT = (
    "metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "store",
    "truncation", "user",
)  # fmt: skip
LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(BaseModel):
    """The body of a request. Other parameters are refused unless they have their neutral value."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None

    @property
    def logprobs(self) -> bool:
        """Whether the response contains logprobs."""
        return LOGPROBS in (self.include or ())

    def chat(self, previous: tuple[Message, ...]) -> ChatRequest:
        """The request in the form that all protocols share.

        Args:
            previous: messages of ``previous_response_id``, the answer included.

        Raises:
            RefusedError: a parameter, a tool or an item of the input is not supported.
        """
        neutral = {"top_logprobs": (0,), "background": (False,), "text": ({"format": {"type": "text"}},)}
        refuse_parameters(self.model_extra, (*SAMPLING, *_WITHOUT_EFFECT), neutral)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RefusedError(
                "invalid", f"max_output_tokens is {self.max_output_tokens}; it must be at least 1", "max_output_tokens"
            )
        tools = [] if self.tool_choice == "none" else self.tools or []
        if self.tool_choice not in (None, "auto", "none"):
            raise RefusedError(
                "invalid", f"tool_choice {self.tool_choice!r} is not supported; use 'auto' or 'none'", "tool_choice"
            )
        # The instructions of earlier requests do not carry over.
        messages: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += previous[1:] if self.instructions and previous[:1] and previous[0]["role"] == "system" else previous
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            _add(messages, item)
        return ChatRequest(
            tuple(messages),
            tuple(map(_tool, tools)),
            max_tokens=self.max_output_tokens,
            logprobs=self.logprobs,
            streams=bool(self.stream),
            sampling=sampling_of(self.model_extra),
        )


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    """Add an item of the input. The text and the calls of one turn are several items, and one message."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "function_call_output":
        output = text_of_parts(item.get("output"), ("input_text", "output_text"))
        messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id", ""))})
    elif kind == "function_call":
        name, arguments = str(item.get("name", "")), parsed_arguments(str(item.get("arguments", "{}")))
        call = {
            "id": str(item.get("call_id", "")), "type": "function", "function": {"name": name, "arguments": arguments}
        }  # fmt: skip
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), call]}
    elif kind == "message" and item.get("role") in ("user", "assistant", "system", "developer"):
        role = "system" if item["role"] == "developer" else item["role"]
        content = text_of_parts(item.get("content"), ("input_text", "output_text", "text"))
        messages.append({"role": role, "content": content})
    else:
        raise RefusedError("invalid", f"an input item of type {kind!r} is not supported", "input")


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RefusedError(
            "invalid", f"a tool of type {tool.get('type')!r} is not supported; only 'function' is", "tools"
        )
    kept = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": kept}


def response_body(reply: Reply, request: ResponsesRequest, served: ServedBy) -> Json:
    """The response to a request that does not stream, and the end of a stream."""
    incomplete = {"reason": "max_output_tokens"} if reply.finish == "length" else None
    return {
        **_begun_body(reply.number, request, served),
        "status": "incomplete" if incomplete else "completed",
        "incomplete_details": incomplete,
        "output": _items(reply, request, served),
        "usage": _usage(reply),
    }


def _begun_body(number: int, request: ResponsesRequest, served: ServedBy) -> Json:
    """The response while a stream begins, when there is no output yet."""
    return {
        "id": response_id(number, served),
        "object": "response",
        "created_at": served.time_s,
        "model": served.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "temperature": None,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": None,
        "usage": None,
    }


class ResponseEvents:
    """Implements ``Events``."""

    def __init__(self, request: ResponsesRequest, served: ServedBy) -> None:
        self._request = request
        self._served = served
        self._num_events = 0
        self._place: Json = {}
        """Of the text, which is the first item; empty until it has begun."""
        self._message_id = ""

    def begun(self, begun: Begun) -> Iterator[Event]:
        self._message_id = _message_id(begun.number, self._served)
        body = _begun_body(begun.number, self._request, self._served)
        yield self._event("response.created", response=body)
        yield self._event("response.in_progress", response=body)

    def text(self, text: str, logprobs: Sequence[Json] = ()) -> Iterator[Event]:
        if not self._place:
            self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
            item = {"id": self._message_id, "type": "message", "role": "assistant"}
            begun = {**item, "status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=0, item=begun)
            yield self._event("response.content_part.added", **self._place, part=_part("", ()))
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=list(logprobs))

    def rest(self, reply: Reply) -> Iterator[Event]:
        for index, item in enumerate(_items(reply, self._request, self._served)):
            if item["type"] == "function_call":
                yield from self._call(index, item)
            else:
                for piece in reply.pieces:
                    yield from self.text(
                        piece.text, token_logprobs(reply, *piece.tokens) if self._request.logprobs else ()
                    )
                [part] = item["content"]
                text, logprobs = part["text"], part["logprobs"]
                yield self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs)
                yield self._event("response.content_part.done", **self._place, part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)
        kind = "response.incomplete" if reply.finish == "length" else "response.completed"
        yield self._event(kind, response=response_body(reply, self._request, self._served))

    def _call(self, index: int, item: Json) -> Iterator[Event]:
        place: Json = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )

    def _event(self, kind: str, **data: Any) -> Event:
        self._num_events += 1
        return kind, {"type": kind, "sequence_number": self._num_events - 1, **data}


def response_id(number: int, served: ServedBy) -> str:
    """Id by which the next request may refer to this response."""
    return f"resp_{served.session}_{number}"


def _message_id(number: int, served: ServedBy) -> str:
    return f"msg_{served.session}_{number}"


def _part(text: str, logprobs: Sequence[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _items(reply: Reply, request: ResponsesRequest, served: ServedBy) -> list[Json]:
    name = f"{served.session}_{reply.number}"
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[Json] = []
    if reply.content or not reply.tool_calls:
        logprobs = token_logprobs(reply, 0, len(reply.token_ids)) if request.logprobs else []
        item = {"id": _message_id(reply.number, served), "type": "message", "role": "assistant", "status": status}
        items.append({**item, "content": [_part(reply.content, logprobs)]})
    for index, call in enumerate(reply.tool_calls):
        items.append(
            {
                "id": f"fc_{name}_{index}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return items


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(reply.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + len(reply.token_ids),
    }
