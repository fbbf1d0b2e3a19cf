"""Reads the tool calls in a turn that the policy wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

ToolCallFormat = Literal["hermes", "json", "none"]

MARKERS: Mapping[ToolCallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "json": ("<|python_tag|>",),
    "none": (),
}
"""Texts by which each format marks tool calls; some tokenizers have special tokens for them."""
_NAMED_OBJECT = re.compile(r'\s*\{\s*"name"\s*:')
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def tool_call_format(chat_template: Any) -> ToolCallFormat:
    """The format in which a chat template writes the tool calls of earlier turns."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    if "<tool_call>" in text:
        return "hermes"
    if "tool_call" in text and '"parameters"' in text:
        return "json"
    return "none"


def parsed_tool_calls(text: str, written: ToolCallFormat) -> tuple[str, list[tuple[str, str]]]:
    """The text before the first tool call, and the calls as (name, JSON of the arguments).

    A turn with a call that is malformed, or with text behind a call, has no calls: its text is the content.
    ``hermes`` is the format of Qwen2.5 and Qwen3, ``json`` that of Llama 3.
    """
    if written == "hermes":
        found = list(_HERMES.finditer(text))
        if not found or _HERMES.sub("", text[found[0].start() :]).strip():
            return text, []
        calls = [_call(match[1]) for match in found]
        content = text[: found[0].start()].rstrip()
    elif written == "json":
        calls, content = [_call(text.strip().removeprefix("<|python_tag|>"))], ""
    else:
        return text, []
    good = [call for call in calls if call is not None]
    return (content, good) if len(good) == len(calls) else (text, [])


def attempts_tool_call(text: str, written: ToolCallFormat) -> bool:
    """Whether a text without a readable call was meant as one: it has a marker of the format, or with ``json`` is all
    one object that begins with a name.
    """
    return any(marker in text for marker in MARKERS[written]) or (
        written == "json" and _NAMED_OBJECT.match(text) is not None
    )


def parsed_arguments(text: str) -> Any:
    """Arguments as chat templates take them: an object, or the text itself if it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _call(text: str) -> tuple[str, str] | None:
    value = parsed_arguments(text)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    if not isinstance(arguments, Mapping):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
