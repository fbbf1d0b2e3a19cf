"""OpenAI's responses: requests, responses and streams (``/v1/responses``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from chatlearn_chat.tool_calls import parsed_arguments
from chatlearn_core.data.format import Message
from chatlearn_gateway.chat import SAMPLING, ChatRequest, RefusedError, Reply
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


def response_body(reply: Reply, request: ResponsesRequest, served: ServedBy, status: str | None = None) -> Json:
    """The response; ``status`` is given while a stream begins, when there is no output yet."""
    incomplete = {"reason": "max_output_tokens"} if reply.finish == "length" else None
    final = "incomplete" if incomplete else "completed"
    done = status is None
    return {
        "id": response_id(reply, served),
        "object": "response",
        "created_at": served.time_s,
        "model": served.model,
        "status": final if done else status,
        "error": None,
        "incomplete_details": incomplete if done else None,
        "instructions": request.instructions,
        "metadata": {},
        "output": _items(reply, request, served) if done else [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "temperature": None,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": None,
        "usage": _usage(reply) if done else None,
    }


def response_events(reply: Reply, request: ResponsesRequest, served: ServedBy) -> Iterator[tuple[str, Json]]:
    """The events of a stream, as (event name, data)."""
    number = 0

    def event(kind: str, **data: Any) -> tuple[str, Json]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number - 1, **data}

    yield event("response.created", response=response_body(reply, request, served, "in_progress"))
    yield event("response.in_progress", response=response_body(reply, request, served, "in_progress"))
    for index, item in enumerate(_items(reply, request, served)):
        place: Json = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield event(
                "response.output_item.added",
                output_index=index,
                item={**item, "arguments": "", "status": "in_progress"},
            )
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            begun = {**item, "content": [], "status": "in_progress"}
            yield event("response.output_item.added", output_index=index, item=begun)
            [part] = item["content"]
            place["content_index"] = 0
            yield event("response.content_part.added", **place, part={**part, "text": "", "logprobs": []})
            for piece in reply.pieces:
                logprobs = token_logprobs(reply, *piece.tokens) if request.logprobs else []
                yield event("response.output_text.delta", **place, delta=piece.text, logprobs=logprobs)
            yield event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    kind = "response.incomplete" if reply.finish == "length" else "response.completed"
    yield event(kind, response=response_body(reply, request, served))


def response_id(reply: Reply, served: ServedBy) -> str:
    """Id by which the next request may refer to this response."""
    return f"resp_{served.session}_{reply.number}"


def _items(reply: Reply, request: ResponsesRequest, served: ServedBy) -> list[Json]:
    name = f"{served.session}_{reply.number}"
    status = "incomplete" if reply.finish == "length" else "completed"
    items: list[Json] = []
    if reply.content or not reply.tool_calls:
        logprobs = token_logprobs(reply, 0, len(reply.token_ids)) if request.logprobs else []
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": logprobs}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]})
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
