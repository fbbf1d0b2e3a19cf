"""Finds the format of a chat template's tool calls: lets it render a call, and looks which format reads it back.

Templates name their format nowhere, and the same markers (``<tool_call>``) enclose different forms.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from chatlearn_chat.control_tokens import ControlTokens
from chatlearn_chat.tool_calls import FORMATS, FormatName, parameters_of, parsed_arguments
from chatlearn_core.data.format import Message
from chatlearn_core.exceptions import DataError

Render = Callable[[Sequence[Message], bool, Sequence[Any]], str]
"""Renders messages, with or without the generation prompt, and with tools."""
ArgumentForm = Literal["object", "text"]

_ARGUMENTS = {"words": "a b", "number": 1}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "string", "description": "Words."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["words"],
        },
    },
}
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(slots=True, frozen=True)
class ToolCallStyle:
    """How a chat template deals with tools."""

    written: FormatName
    """``none`` if it writes no calls, or in no known format."""
    arguments: ArgumentForm
    """In which form it takes the arguments of a call."""
    introduces_tools: bool
    """Whether it writes the tools into the prompt."""


NO_TOOLS = ToolCallStyle("none", "object", False)


def tool_call_style(render: Render, control: ControlTokens) -> ToolCallStyle:
    """Return how a chat template deals with tools."""
    try:
        prompt = render([_QUESTION], True, [_TOOL])
        introduces_tools = prompt != render([_QUESTION], True, [])
    except DataError:
        return NO_TOOLS  # the template needs another kind of conversation
    taken: list[ArgumentForm] = []
    forms: tuple[tuple[ArgumentForm, Any], ...] = (("object", _ARGUMENTS), ("text", json.dumps(_ARGUMENTS)))
    for form, arguments in forms:
        call = {"id": "000000000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        try:
            whole = render([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], False, [_TOOL])
        except DataError:
            continue
        taken.append(form)
        turn = _turn(whole, prompt, control)
        for name, written in FORMATS.items():
            found = written.calls(turn, parameters_of([_TOOL]))
            if found is not None and found.calls == (("probe", _ARGUMENTS),):
                return ToolCallStyle(name, form, introduces_tools)
    return ToolCallStyle("none", taken[0] if taken else "object", introduces_tools)


def in_form(messages: Sequence[Message], form: ArgumentForm) -> list[Message]:
    """Messages with the arguments of their tool calls in the form that a chat template takes."""
    return [_with_arguments(message, form) if message.get("tool_calls") else message for message in messages]


def _with_arguments(message: Message, form: ArgumentForm) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            given = function["arguments"]
            if form == "text" and isinstance(given, Mapping):
                given = json.dumps(given, ensure_ascii=False)
            elif form == "object" and isinstance(given, str):
                given = parsed_arguments(given)
            call = {**call, "function": {**function, "arguments": given}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _turn(whole: str, prompt: str, control: ControlTokens) -> str:
    """The text of the turn behind its thought, without the tokens that end it.

    A generation prompt may open a thought that the rendered turn lacks; the two then depart within a tag.
    """
    common = os.path.commonprefix([whole, prompt])  # noqa: RUF071  # by characters, as it is meant
    if (tag := common.rfind("<")) > common.rfind(">"):
        common = common[:tag]
    turn = whole[len(common) :].rstrip().rpartition("</think>")[2]
    while (end := control.last_at_end_of(turn)) is not None and not _marks_calls(end):
        turn = turn.removesuffix(end).rstrip()
    return turn


def _marks_calls(token: str) -> bool:
    return any(token in written.markers for written in FORMATS.values())
