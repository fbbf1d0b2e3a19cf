"""The formats in which models write tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatlearn_chat.tool_markup import (
    Parameters,
    WrittenCalls,
    begins_object,
    deepseek_calls,
    glm_calls,
    harmony_calls,
    harmony_content,
    hermes_calls,
    json_calls,
    json_object,
    names_recipient,
    xml_calls,
)

FormatName = Literal["hermes", "json", "glm", "qwen_xml", "deepseek", "harmony", "none"]
THOUGHT_END = "</think>"


@dataclass(slots=True, frozen=True)
class ToolCallFormat:
    """How a family of models writes tool calls."""

    markers: tuple[str, ...] = ()
    """Texts that mark calls; some tokenizers have special tokens for them, which decoding must keep."""
    calls: Callable[[str, Parameters], WrittenCalls | None] = lambda text, parameters: None
    """Reads the calls of a turn; None if it has none, or one that cannot be read."""
    attempts: Callable[[str], bool] | None = None
    """Whether a turn was meant as a call; by default whether it has a marker."""
    content: Callable[[str], str] | None = None
    """What a turn without calls says; by default all of it."""
    error_role: Literal["tool", "user"] = "tool"
    """Role of the message that answers a call which cannot be read. ``user`` where the chat template refuses results
    without a call."""


FORMATS: Mapping[FormatName, ToolCallFormat] = {
    "hermes": ToolCallFormat(("<tool_call>", "</tool_call>"), hermes_calls),
    "glm": ToolCallFormat(("<tool_call>", "</tool_call>"), glm_calls),
    "qwen_xml": ToolCallFormat(("<tool_call>", "</tool_call>"), xml_calls),
    "deepseek": ToolCallFormat(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁sep｜>"),
        deepseek_calls,
    ),
    "harmony": ToolCallFormat(
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
        harmony_calls, names_recipient, harmony_content, "user",
    ),
    "json": ToolCallFormat(("<|python_tag|>",), json_calls, begins_object),
    "none": ToolCallFormat(),
}  # fmt: skip
"""Formats by name. ``json`` comes behind those with markers, whose bodies may be such objects."""


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Parameters:
    """The schemas of tools that are given as chat templates take them, by name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {one["name"]: one.get("parameters") or {} for one in functions}


def parsed_tool_calls(
    text: str, written: FormatName, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[tuple[str, str]]]:
    """The text before the first tool call, and the calls as (name, JSON of the arguments).

    A turn with a call that is malformed, or with text behind a call, has no calls. Calls within a thought
    (``<think>..</think>``) are part of the thought.

    Args:
        tools: as chat templates take them; their schemas give types to the arguments of formats that write none.
    """
    thought, said = _behind_thought(text)
    found = FORMATS[written].calls(said, parameters_of(tools))
    if found is None:
        return turn_content(text, written), []
    calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found.calls]
    return (thought + found.content if found.content else thought).rstrip(), calls


def turn_content(text: str, written: FormatName) -> str:
    """What a turn without tool calls says."""
    content = FORMATS[written].content
    return text if content is None else content(text)


def attempts_tool_call(text: str, written: FormatName) -> bool:
    """Whether a turn without a readable call was meant as one: it has a marker of the format behind its thought, with
    ``json`` is all one object that begins with a name, or with ``harmony`` names a recipient.
    """
    said, form = _behind_thought(text)[1], FORMATS[written]
    return form.attempts(said) if form.attempts is not None else any(marker in said for marker in form.markers)


def parsed_arguments(text: str) -> Any:
    """The object that arguments are, or the text itself if it is no JSON object."""
    value = json_object(text)
    return text if value is None else value


def _behind_thought(text: str) -> tuple[str, str]:
    """The text up to the end of its thought, and what is behind it."""
    head, end, said = text.rpartition(THOUGHT_END)
    return head + end, said
