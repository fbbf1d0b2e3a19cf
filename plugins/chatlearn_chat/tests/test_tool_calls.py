"""Tool calls as models write them, and texts that only look like calls."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_chat.tool_calls import attempts_tool_call, parsed_arguments, parsed_tool_calls, tool_call_format

ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("written", "text", "expected"),
    [
        ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", ("", [("add", '{"a": 1}')])),
        (
            "hermes",
            f"Both. <tool_call>{ADD}</tool_call>\n<tool_call>{ADD.replace('1', '2')}</tool_call>",
            ("Both.", [("add", '{"a": 1}'), ("add", '{"a": 2}')]),
        ),
        ("json", '{"name": "add", "parameters": {"a": "ü"}}', ("", [("add", '{"a": "ü"}')])),
        ("json", f"<|python_tag|>{ADD}", ("", [("add", '{"a": 1}')])),
        ("json", '{"name": "now"}', ("", [("now", "{}")])),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    ],
)
def test_calls(written: Any, text: str, expected: Any) -> None:
    assert parsed_tool_calls(text, written) == expected


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("hermes", "It is 2."),
        ("hermes", f"<tool_call>{ADD}"),
        ("hermes", f"<tool_call>{ADD}</tool_call> and more"),
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>"),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", f"<tool_call>{ADD}</tool_call><tool_call>broken</tool_call>"),
        ("json", "It is {2}."),
        ("json", "[" * 100_000),
        ("none", f"<tool_call>{ADD}</tool_call>"),
    ],
)
def test_text_that_is_no_call_stays_the_content(written: Any, text: str) -> None:
    assert parsed_tool_calls(text, written) == (text, [])


def test_the_format_is_that_of_the_chat_template() -> None:
    assert tool_call_format("...<tool_call>...") == "hermes"
    assert tool_call_format('{{ message.tool_calls }} {"name": .., "parameters": ..}') == "json"
    assert tool_call_format("{{ message.content }}") == tool_call_format(None) == "none"


def test_arguments_that_are_no_object_stay_text() -> None:
    assert parsed_arguments('{"a": 1}') == {"a": 1}
    assert parsed_arguments("[1]") == "[1]"
    assert parsed_arguments("{a}") == "{a}"


@pytest.mark.parametrize(
    ("written", "text", "expected"),
    [
        ("hermes", f"<tool_call>{ADD}", True),
        ("hermes", f"<tool_call>{ADD}</tool_call> and more", True),
        ("hermes", "It is 2.", False),
        ("json", '<|python_tag|>{"name": "add", ', True),
        ("json", ' {"name": "add", "parameters": {', True),
        ("json", "It is {2}.", False),
        ("none", f"<tool_call>{ADD}", False),
    ],
)
def test_what_was_meant_as_a_call(written: Any, text: str, expected: bool) -> None:
    assert attempts_tool_call(text, written) is expected
