"""Tool calls as models write them, and texts that only look like calls."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_chat.tool_call_probe import in_form
from chatlearn_chat.tool_calls import attempts_tool_call, parsed_arguments, parsed_tool_calls, turn_content

ADD = '{"name": "add", "arguments": {"a": 1}}'
TYPES = {"a": "integer", "s": "string", "on": "boolean", "any": ["string", "null"], "list": "array"}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}},
        },
    },
)


def glm(*pairs: tuple[str, str]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>add\n{inside}</tool_call>"


def xml(*pairs: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=add>\n{inside}</function>\n</tool_call>"


def deepseek(*calls: str) -> str:
    inside = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


V3 = 'function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
THOUGHT = "<|channel|>analysis<|message|>2<|end|><|start|>assistant"
TYPED = [("a", "1"), ("s", "1"), ("on", "True"), ("any", "null"), ("list", '["x"]'), ("other", "x y")]
AS_TYPED = '{"a": 1, "s": "1", "on": true, "any": null, "list": ["x"], "other": "x y"}'


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
        (
            "hermes",
            f"<think>or <tool_call>{ADD.replace('1', '2')}</tool_call>?</think>Now. <tool_call>{ADD}</tool_call>",
            (
                f"<think>or <tool_call>{ADD.replace('1', '2')}</tool_call>?</think>Now.",
                [("add", '{"a": 1}')],
            ),
        ),
        ("glm", f"\n<think>so</think>\n{glm(*TYPED)}", ("\n<think>so</think>", [("add", AS_TYPED)])),
        ("glm", "<tool_call>now</tool_call>", ("", [("now", "{}")])),
        ("glm", f"Both.\n{glm(('a', '1'))}{glm(('a', '2'))}", ("Both.", [("add", '{"a": 1}'), ("add", '{"a": 2}')])),
        ("qwen_xml", f"so\n</think>\n\n{xml(*TYPED)}\n", ("so\n</think>", [("add", AS_TYPED)])),
        ("qwen_xml", xml(("s", "<parameter=x>\n  </parameter> y\n")),
         ("", [("add", '{"s": "<parameter=x>\\n  </parameter> y\\n"}')])),
        ("deepseek", f"so</think>Now.{deepseek(V3)}", ("so</think>Now.", [("add", '{"a": 1}')])),
        ("deepseek", deepseek(V3, V3.replace("1", "2")), ("", [("add", '{"a": 1}'), ("add", '{"a": 2}')])),
        ("deepseek", deepseek('add<｜tool▁sep｜>{"a": 1}'), ("", [("add", '{"a": 1}')])),  # V3.1
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ("", [("add", '{"a": 1}')])),
        (
            "harmony",
            f"{THOUGHT}<|channel|>commentary<|message|>Let me add.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            ("Let me add.", [("add", '{"a": 1}')]),
        ),
        ("harmony", f"{THOUGHT}<|channel|>final<|message|>It is 2.", ("It is 2.", [])),
    ],
)  # fmt: skip
def test_calls(written: Any, text: str, expected: Any) -> None:
    assert parsed_tool_calls(text, written, TOOLS) == expected


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
        ("hermes", f"<think><tool_call>{ADD}</tool_call></think>It is 2."),
        ("glm", f"<tool_call>{ADD}</tool_call>"),
        ("glm", glm(("a", "1")).replace("</arg_value>", "")),
        ("qwen_xml", f"<tool_call>{ADD}</tool_call>"),
        ("qwen_xml", xml(("a", "1")) + " and more"),
        ("qwen_xml", xml(("a", "1")).replace("</parameter>", "")),
        ("deepseek", deepseek(V3) + " and more"),
        ("deepseek", deepseek(V3.replace("{", "["))),
        ("deepseek", deepseek("add 1")),
        ("deepseek", deepseek("between").replace("<｜tool▁call▁begin｜>", "")),
        ("harmony", "It is 2."),
        ("json", "It is 2."),
    ],
)
def test_text_that_is_no_call_stays_the_content(written: Any, text: str) -> None:
    assert parsed_tool_calls(text, written) == (text, [])


def test_messages_in_channels_that_are_no_call() -> None:
    """The channels of gpt-oss: only what is said to the user is the content."""
    broken = f"{THOUGHT}<|channel|>commentary to=functions.add json<|message|>{{"
    assert parsed_tool_calls(broken, "harmony") == ("", [])
    assert (
        turn_content(f"{THOUGHT}<|channel|>final<|message|>It is<|channel|>final<|message|> 2.", "harmony") == "It is"
    )
    assert turn_content("<|channel|>analysis<|message|>so", "harmony") == ""


def test_arguments_in_the_form_of_a_template() -> None:
    def calling(arguments: Any) -> Any:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    plain = {"role": "user", "content": "x"}
    assert in_form([plain, calling({"a": "ü"})], "text") == [plain, calling('{"a": "ü"}')]
    assert in_form([calling('{"a": 1}'), calling("{a"), calling({"a": 1})], "object") == [
        calling({"a": 1}), calling("{a"), calling({"a": 1}),
    ]  # fmt: skip


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
        ("hermes", f"<think><tool_call>{ADD}</think>It is 2.", False),
        ("hermes", f"</think><tool_call>{ADD}", True),
        ("qwen_xml", "<tool_call><function=", True),
        ("deepseek", "<｜tool▁calls▁begin｜>", True),
        ("harmony", f"{THOUGHT}<|channel|>commentary to=functions.add json<|message|>{{", True),
        ("harmony", f"{THOUGHT}<|channel|>commentary to=functions.add", True),
        ("harmony", f"{THOUGHT}<|channel|>final<|message|>mail to=functions.add", False),
        ("harmony", "mail to=you", False),
    ],
)
def test_what_was_meant_as_a_call(written: Any, text: str, expected: bool) -> None:
    assert attempts_tool_call(text, written) is expected
