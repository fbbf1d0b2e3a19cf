"""How models mark tool calls: reads the calls in a turn, in each of the known formats.

A reader returns None for a text without a whole call. A turn is read as a whole: one call that is malformed, or text
behind a call, leaves no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Parameters = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON Schema of its arguments; for formats that write arguments without their types."""
Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""


@dataclass(slots=True, frozen=True)
class WrittenCalls:
    """A turn that calls tools."""

    content: str
    """The text before the calls."""
    calls: tuple[Call, ...]


_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_GLM_NAME = re.compile(r"([^\s<]+)\s*(.*)", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*(.*?)\s*</function>", re.DOTALL)
_XML_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_DEEPSEEK_CALLS = re.compile(r"<｜tool▁calls▁begin｜>\s*(.*?)\s*<｜tool▁calls▁end｜>", re.DOTALL)
_DEEPSEEK_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"(\S+)\s*```json\s*(.*?)\s*```", re.DOTALL)
_NAMED_OBJECT = re.compile(r'\s*\{\s*"name"\s*:')
_HARMONY_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_HARMONY_TOKENS = re.compile(r"<\|(?:channel|message|constrain)\|>")
_HARMONY_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def hermes_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """``<tool_call>{"name": .., "arguments": {..}}</tool_call>`` (Qwen2.5, Qwen3)."""
    return _tagged(_TOOL_CALL, text, _named_call)


def json_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """The whole turn is ``{"name": .., "parameters": {..}}`` (Llama 3)."""
    call = _named_call(text.strip().removeprefix("<|python_tag|>"))
    return None if call is None else WrittenCalls("", (call,))


def glm_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """``<tool_call>name <arg_key>..</arg_key><arg_value>..</arg_value>..</tool_call>`` (GLM-4.5)."""

    def call(body: str) -> Call | None:
        named = _GLM_NAME.fullmatch(body)
        return None if named is None else _pairs(named[1], _GLM_ARGUMENT, named[2], parameters)

    return _tagged(_TOOL_CALL, text, call)


def xml_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """``<tool_call><function=name><parameter=key>..</parameter>..</function></tool_call>`` (Qwen3-Coder, Qwen3.5,
    Nemotron 3).
    """

    def call(body: str) -> Call | None:
        named = _XML_FUNCTION.fullmatch(body)
        return None if named is None else _pairs(named[1].strip(), _XML_ARGUMENT, named[2], parameters)

    return _tagged(_TOOL_CALL, text, call)


def deepseek_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`` with a block of JSON (DeepSeek-V3, R1), or
    ``name<｜tool▁sep｜>{..}`` (V3.1).
    """

    def call(body: str) -> Call | None:
        first, separator, rest = body.partition("<｜tool▁sep｜>")
        fenced = _FENCED.fullmatch(rest.strip())
        if not separator:
            return None
        return _call(fenced[1], fenced[2]) if fenced is not None else _call(first.strip(), rest)

    block = _DEEPSEEK_CALLS.search(text)
    if block is None or text[block.end() :].strip():
        return None
    found = _tagged(_DEEPSEEK_CALL, block[1], call)
    return None if found is None or found.content else WrittenCalls(text[: block.start()].rstrip(), found.calls)


def harmony_calls(text: str, parameters: Parameters) -> WrittenCalls | None:
    """Messages in channels, a call of which names its recipient, ``to=functions.name`` (gpt-oss)."""
    messages = _harmony_messages(text)
    calls = [_call(name[1], body or "") for header, body in messages if (name := _HARMONY_RECIPIENT.search(header))]
    good = [call for call in calls if call is not None]
    return WrittenCalls(harmony_content(text), tuple(good)) if good and len(good) == len(calls) else None


def harmony_content(text: str) -> str:
    """What a turn in channels says to the user: its final message, or the comments before a call."""
    messages = [(header, body) for header, body in _harmony_messages(text) if body is not None]
    if not messages:
        return text
    said = (body for header, body in messages if "analysis" not in header and not _HARMONY_RECIPIENT.search(header))
    return "\n".join(said)


def begins_object(text: str) -> bool:
    """Whether a text is meant as a call of the format ``json``."""
    return "<|python_tag|>" in text or _NAMED_OBJECT.match(text) is not None


def names_recipient(text: str) -> bool:
    """Whether a turn in channels is meant as a call."""
    return any(
        _HARMONY_RECIPIENT.search(header)
        for header, body in _harmony_messages(text)
        if body is not None or "<|channel|>" in header
    )


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text writes in JSON; None if it writes none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _tagged(pattern: re.Pattern[str], text: str, call: Callable[[str], Call | None]) -> WrittenCalls | None:
    """Read each match of a pattern; there must be nothing behind the first but further ones."""
    found = list(pattern.finditer(text))
    if not found or pattern.sub("", text[found[0].start() :]).strip():
        return None
    calls = [call(match[1]) for match in found]
    good = tuple(one for one in calls if one is not None)
    return WrittenCalls(text[: found[0].start()].rstrip(), good) if len(good) == len(calls) else None


def _named_call(text: str) -> Call | None:
    value = json_object(text)
    if value is None or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_object(arguments)
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def _call(name: str, arguments: str) -> Call | None:
    value = json_object(arguments)
    return None if value is None or not name else (name, value)


def _pairs(name: str, pattern: re.Pattern[str], text: str, parameters: Parameters) -> Call | None:
    """A call whose arguments are written as texts; the tool's schema gives them types."""
    if pattern.sub("", text).strip():
        return None
    properties = parameters.get(name, {}).get("properties", {})
    return name, {
        match[1].strip(): _typed(match[2], properties.get(match[1].strip())) for match in pattern.finditer(text)
    }


_LITERALS = {"True": True, "False": False, "None": None}
"""Some templates write values as Python does."""
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "array": list, "boolean": bool, "integer": int, "null": type(None), "number": (int, float), "object": dict,
}  # fmt: skip


def _typed(text: str, schema: Any) -> Any:
    """A value as its schema means it: a text stays text if it may be one and is nothing else that is allowed."""
    given = schema.get("type") if isinstance(schema, Mapping) else None
    allowed: Sequence[Any] = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if list(allowed) == ["string"]:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _LITERALS.get(text.strip(), text)
    fits = not allowed or any(_is_a(value, name) for name in allowed)
    return value if fits or "string" not in allowed else text


def _is_a(value: Any, name: Any) -> bool:
    kind = _TYPES.get(name, ()) if isinstance(name, str) else ()
    return isinstance(value, kind) and (name == "boolean" or not isinstance(value, bool))


def _harmony_messages(text: str) -> list[tuple[str, str | None]]:
    """(header, body) of the messages in a turn; the body is None if the header is all there is."""
    messages: list[tuple[str, str | None]] = []
    for part in _HARMONY_ENDS.split(text):
        header, separator, body = part.partition("<|message|>")
        if part.strip():
            messages.append((header, _HARMONY_TOKENS.split(body)[0] if separator else None))
    return messages
