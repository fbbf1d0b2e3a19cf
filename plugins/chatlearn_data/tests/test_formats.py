"""What each format reads out of a row, and that ``format: auto`` finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.data.selection import detect_format, select_format
from chatlearn_core.exceptions import ConfigError, DataError
from chatlearn_core.plugins.entry import PluginEntry
from chatlearn_core.plugins.registry import PluginRegistry
from chatlearn_data.plugin import chatlearn_datasets

CHAT = [{"role": "user", "content": "2+2?"}]
PLUGINS = PluginRegistry(
    tuple(
        PluginEntry(name=s.name, kind="dataset", distribution="chatlearn-data", version="0", status="ok", record=s)
        for s in chatlearn_datasets()
    )
)
PUBLISHED = Path(__file__).parent / "published"


def parse(name: str, row: dict[str, Any], **options: Any) -> Any:
    return select_format(PLUGINS, name, options, "data.train[0]").parse(row)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("data_source prompt ability reward_model extra_info", "verifiable"),
        ("id prompt reward_model", "verifiable"),
        ("prompt answer", "prompt"),
        ("prompt solution data_source", "prompt"),
        ("prompt", "prompt"),
        ("prompt completion", "sft"),
        ("messages", "messages"),
        ("prompt chosen rejected", "preference"),
        ("chosen rejected score_chosen score_rejected", "preference"),
        ("prompt completions scores", "ranked"),
        ("prompt completion label", "sft"),
        ("question answer", "gsm8k"),
        ("problem level type solution", "math"),
        ("problem solution answer subject level unique_id", "math"),
    ],
)
def test_auto_recognises_the_usual_columns(columns: str, name: str) -> None:
    assert detect_format(PLUGINS, dict.fromkeys(columns.split(), ""), "data.train[0]") == name


def test_verifiable() -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 7},
    }
    raw = parse("verifiable", row)
    assert (raw.prompt, raw.ground_truth, raw.data_source, raw.id) == (CHAT, "4", "gsm8k", None)
    assert raw.columns == {key: row[key] for key in ("ability", "reward_model", "extra_info")}
    assert parse("verifiable", {**row, "reward_model": None}).ground_truth is None
    with pytest.raises(DataError, match="'reward_model' must be an object, not 'rule'"):
        parse("verifiable", {**row, "reward_model": "rule"})


@pytest.mark.parametrize("column", ["ground_truth", "answer", "label", "solution"])
@pytest.mark.parametrize("prompt", ["2+2?", CHAT])
def test_prompt_takes_text_or_chat_and_any_answer_column(prompt: Any, column: str) -> None:
    raw = parse("prompt", {"prompt": prompt, column: "4", "level": 1})
    assert (raw.prompt, raw.ground_truth) == (prompt, "4")
    assert raw.columns == {column: "4", "level": 1}


def test_blank_answers_are_none_but_falsy_ones_count() -> None:
    assert parse("prompt", {"prompt": "x", "answer": " "}).ground_truth is None
    assert parse("prompt", {"prompt": "x", "answer": 0}).ground_truth == 0
    assert parse("prompt", {"prompt": "x", "answer": "", "solution": "4"}).ground_truth == "4"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": 1}, "column 'prompt' is missing; the row has 'answer'"),
        ({"prompt": None}, "column 'prompt' is null"),
        ({"prompt": 7}, "column 'prompt' must be text or a list of messages, not 7"),
        ({"prompt": ["a"]}, "must be text or a list of messages"),
        ({"prompt": "x", "id": ""}, "column 'id' must be text or a whole number"),
        ({"prompt": "x", "id": 1.5}, "column 'id' must be text or a whole number"),
        ({"prompt": "x", "data_source": 3}, "column 'data_source' must be text, not int: 3"),
    ],
)
def test_malformed_rows_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        parse("prompt", row)


def test_numbers_are_ids_too() -> None:
    assert parse("prompt", {"prompt": "x", "id": 0}).id == "0"


def test_nulls_that_parquet_puts_into_messages_are_dropped() -> None:
    assert parse("prompt", {"prompt": [{"role": "user", "content": "x", "tool_calls": None}]}).prompt == [
        {"role": "user", "content": "x"}
    ]


def test_answers_are_required_unless_optional() -> None:
    assert select_format(PLUGINS, "prompt", {}, "d").answer_required
    assert not select_format(PLUGINS, "prompt", {"answer": "optional"}, "d").answer_required
    with pytest.raises(ConfigError, match=r"d\.options\.answer.*is 'maybe'"):
        select_format(PLUGINS, "prompt", {"answer": "maybe"}, "d")


def test_keys() -> None:
    row = {"q": "2+2?", "meta": {"gold": "4", "source": "sums"}, "key": 9, "a": "It is 4."}
    options = {"input_key": "q", "label_key": "meta.gold", "data_source_key": "meta.source", "id_key": "key"}
    raw = parse("keys", row, **options, completion_key="a")
    assert (raw.prompt, raw.ground_truth, raw.data_source, raw.id) == ("2+2?", "4", "sums", "9")
    assert raw.completion == "It is 4."
    with pytest.raises(DataError, match="column 'input' is missing; the row has 'q', 'meta', 'key', 'a'"):
        parse("keys", row, input_key="input")
    assert not select_format(PLUGINS, "keys", {"label_key": None}, "d").answer_required


@pytest.mark.parametrize("completion", [{"completion": "4"}, {"response": "4"}])
def test_sft(completion: dict[str, str]) -> None:
    raw = parse("sft", {"prompt": "2+2?", **completion, "answer": "4"})
    assert (raw.prompt, raw.completion, raw.ground_truth) == ("2+2?", "4", "4")


def test_sft_with_an_assistant_message_as_completion() -> None:
    message = {"role": "assistant", "content": "4"}
    raw = parse("sft", {"prompt": CHAT, "completion": [message]})
    assert (raw.prompt, raw.completion, raw.imitates_prompt) == (CHAT, [message], False)
    with pytest.raises(DataError, match="must be text, or messages with at least one of the assistant"):
        parse("sft", {"prompt": CHAT, "completion": [{"role": "user", "content": "4"}]})


def test_messages() -> None:
    answer = {"role": "assistant", "content": "4"}
    raw = parse("messages", {"messages": [*CHAT, answer]})
    assert (raw.prompt, raw.completion, raw.imitates_prompt) == (CHAT, [answer], True)
    assert not parse("messages", {"messages": [*CHAT, answer]}, turns="last").imitates_prompt
    for bad in (CHAT, [{"role": "assistant", "content": "4"}], "text"):
        with pytest.raises(DataError, match="the last one the assistant's"):
            parse("messages", {"messages": bad})


TOOL = {"type": "function", "function": {"name": "add", "description": None, "parameters": {"a": None}}}


@pytest.mark.parametrize("name", ["messages", "sft", "prompt", "verifiable", "keys"])
@pytest.mark.parametrize("written", [[TOOL], json.dumps([TOOL])], ids=["list", "json"])
def test_tools_are_for_the_template(name: str, written: Any) -> None:
    row = {"messages": [*CHAT, {"role": "assistant", "content": "4"}]} if name == "messages" else {"prompt": CHAT}
    without_nulls = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    assert parse(name, {**row, "tools": written}).tools == without_nulls
    for absent in ({}, {"tools": None}, {"tools": ""}):
        assert parse(name, {**row, **absent}).tools == ()
    with pytest.raises(DataError, match="column 'tools' must be a list of functions or its JSON"):
        parse(name, {**row, "tools": "add, subtract"})


def test_tools_in_another_column() -> None:
    assert parse("keys", {"prompt": CHAT, "functions": [TOOL]}, tools_key="functions").tools
    assert not parse("keys", {"prompt": CHAT, "tools": "a saw"}, tools_key=None).tools


def published(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PUBLISHED / f"{name}.jsonl").read_text().splitlines()]


def test_gsm8k_rows_as_published() -> None:
    raws = [parse("gsm8k", row) for row in published("gsm8k")]
    assert [raw.ground_truth for raw in raws] == ["72", "10", "109200000", "-47", "3"]
    assert raws[0].prompt[0]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert (
        raws[0].prompt[0]["content"].endswith('\nLet\'s think step by step and output the final answer after "####".')
    )
    assert "<<" not in raws[0].completion
    assert raws[0].completion.endswith("= 72 clips altogether in April and May.\n#### 72")


def test_math_rows_as_published() -> None:
    raws = [parse("math", row) for row in published("math")]
    assert [raw.ground_truth for raw in raws] == [
        r"\left(1,\frac{9}{2}\right)",
        "1",
        r"\mbox{Saturday}",
        r"\begin{pmatrix} 3 \\ 3 \\ -3 \end{pmatrix}",
        r"\left( 3, \frac{\pi}{2} \right)",
    ]
    assert raws[1].completion == published("math")[1]["solution"]


def test_the_instruction_can_be_changed_or_left_out() -> None:
    row = {"question": "Why?", "answer": "#### 1"}
    assert parse("gsm8k", row, instruction="Answer!").prompt[0]["content"] == "Why?\nAnswer!"
    assert parse("gsm8k", row, instruction="").prompt[0]["content"] == "Why?"
