"""From files to examples: what becomes of good rows, and what is said about bad ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chatlearn_algorithms.example_kinds import Demonstrations
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.data import ExampleSet, Prompts, build_dataset
from chatlearn_core.exceptions import DataError, PluginNotFoundError
from chatlearn_core.types import Demonstration, Prompt

TEMPLATE_TOKENS = len("[user][assistant]")

Build = Callable[..., ExampleSet]


@pytest.fixture
def build(tokenizer: Any, plugins: Any, data_config: Any) -> Build:
    """``build(path, ..., key=value)``: the training examples of a data section."""

    def run(*paths: Any, kind: Any = Prompts, prompt: int = 100, length: int = 200, **fields: Any) -> ExampleSet:
        config = data_config(*paths, **fields)
        renderer = ChatTemplateRenderer(
            tokenizer,
            config.apply_chat_template,
            config.system_prompt,
            control_tokens=config.control_tokens,
            max_tokens=length,
        )
        return build_dataset(config, renderer, plugins, kind=kind(), max_prompt_tokens=prompt, max_length=length)

    return run


def ids(examples: Any) -> list[str]:
    return [example.id for example in examples]


def test_a_row_becomes_a_prompt(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": "2+2", "answer": "4", "level": 3}, {"prompt": "1", "id": "own", "answer": 1}])
    first, second = build(path)
    assert isinstance(first, Prompt)
    assert (first.id, first.text, first.data_source) == ("train/0", "[user]2+2[assistant]", "train")
    assert (first.ground_truth, first.columns["level"]) == ("4", 3)
    assert second.id == "own"


def test_a_row_becomes_a_demonstration(build: Build, write_rows: Any) -> None:
    (example,) = build(write_rows([{"prompt": "2+2", "completion": "4"}]), kind=Demonstrations)
    assert isinstance(example, Demonstration)
    assert example.completion_ids.tolist() == [ord("4"), 1]


def test_ids_do_not_depend_on_rows_left_out(build: Build, write_rows: Any) -> None:
    rows = [{"prompt": "a", "answer": 1}, "broken", {"prompt": "x" * 300, "answer": 1}, {"prompt": "d", "answer": 1}]
    assert ids(build(write_rows(rows), on_bad_row="skip")) == ["train/0", "train/3"]


def test_eval_ids_differ_from_train_ids(tokenizer: Any, plugins: Any, data_config: Any, write_rows: Any) -> None:
    path = write_rows([{"prompt": "a", "answer": 1}])
    config = data_config(path, eval=[{"path": path, "name": "math"}])
    limits: Any = {"kind": Prompts(), "max_prompt_tokens": 50, "max_length": 60}
    (example,) = build_dataset(config, ChatTemplateRenderer(tokenizer), plugins, **limits, split="eval")
    assert (example.id, example.data_source) == ("eval/math/0", "math")


def test_datasets_of_one_name_are_told_apart(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": "a", "answer": 1}])
    examples = build(path, path, {"path": path, "weight": 3.0})
    assert ids(examples) == ["train/0", "train-2/0", "train-3/0"]
    assert [dataset.weight for dataset in examples.datasets] == [1.0, 1.0, 3.0]


def test_a_prompt_that_the_run_cannot_use_is_a_bad_row(tokenizer, plugins, data_config, write_rows) -> None:
    path = write_rows([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": "?"}])
    limits: Any = {"kind": Prompts(), "max_prompt_tokens": 50, "max_length": 60}

    def check(prompt: Prompt) -> str | None:
        return f"prompt {prompt.id!r} has no answer" if prompt.ground_truth == "?" else None

    renderer = ChatTemplateRenderer(tokenizer)
    with pytest.raises(DataError, match=r"(?s)1 of 2 rows.*line 2: prompt 'train/1' has no answer.*on_bad_row=skip"):
        build_dataset(data_config(path), renderer, plugins, **limits, check=check)
    kept = build_dataset(data_config(path, on_bad_row="skip"), renderer, plugins, **limits, check=check)
    assert ids(kept) == ["train/0"]


def test_limit_takes_the_first_rows(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": str(i), "answer": i} for i in range(5)] + ["broken, but never read"])
    assert ids(build({"path": path, "limit": 2})) == ["train/0", "train/1"]


def test_a_reader_of_a_plugin_is_used(build: Build, tmp_path: Path) -> None:
    (tmp_path / "many.rows").write_text("3")
    assert len(build(str(tmp_path / "many.rows"))) == 6


def test_long_prompts_are_filtered_and_counted(build: Build, write_rows: Any) -> None:
    rows = [{"prompt": "x" * n, "answer": 1} for n in (10, 11, 12)]
    examples = build(write_rows(rows), prompt=TEMPLATE_TOKENS + 11)
    (report,) = examples.reports
    assert (report.num_rows, report.num_examples, report.num_filtered, report.num_bad) == (3, 2, 1, 0)
    assert report.longest_prompt_tokens == TEMPLATE_TOKENS + 12
    assert "1 too long (limit 28 prompt tokens)" in str(report)


def test_a_prompt_that_is_too_long_without_doubt_is_not_tokenised(
    build: Build, write_rows: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, seen = tokenizer.encode, []
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: seen.append(len(text)) or encode(text, **options))
    path = write_rows([{"prompt": "x" * n, "answer": 1} for n in (50, 10_000_000)])
    (report,) = build(path, prompt=100, length=200).reports
    assert (report.num_examples, report.num_filtered) == (1, 1)
    assert max(seen) < 100
    assert report.longest_prompt_tokens >= 10_000_000, "every token of this vocabulary has one character"


def test_long_demonstrations_are_filtered_by_their_whole_length(build: Build, write_rows: Any) -> None:
    rows = [{"prompt": "x", "completion": "y" * n} for n in (10, 11)]
    examples = build(write_rows(rows), kind=Demonstrations, length=TEMPLATE_TOKENS + 1 + 10 + 1)
    assert ids(examples) == ["train/0"]


def test_no_prompt_short_enough_is_an_error_with_the_numbers(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": "x" * n, "answer": 1} for n in (30, 40)])
    with pytest.raises(DataError, match=r"(?s)2 of 2 rows filtered.*47 to 57 tokens; at most 20 fit"):
        build(path, prompt=20)


def test_missing_file_is_an_error(build: Build, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        build(str(tmp_path / "train.jsonl"))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_an_error(build: Build, tmp_path: Path, content: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"train.jsonl' \(data.train\[0\].path\) is empty"):
        build(str(tmp_path / "train.jsonl"))


BAD_ROWS = [
    ("{broken", "not valid JSON"),
    ({"prompt": "x"}, r"no answer \(looked in: answer\)"),
    ({"prompt": "  ", "answer": 1}, "the prompt is empty"),
    ({"prompt": [], "answer": 1}, "the prompt must be a string or a non-empty list"),
    ({"answer": 1, "text": "x"}, "the format raised KeyError: 'prompt'"),
    ({"prompt": "x", "answer": 1, "kind": "odd"}, "odd rows are refused"),
    ({"prompt": "x", "answer": 1, "id": "a"}, "id 'a' was already given to .*train.jsonl line 1"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_an_error_with_its_line(build: Build, write_rows: Any, row: Any, reason: str) -> None:
    path = write_rows([{"prompt": "x", "answer": 1, "id": "a"}, row])
    with pytest.raises(DataError, match=rf"(?s)1 of 2 rows.*train.jsonl line 2: {reason}.*data.on_bad_row=skip"):
        build(path)


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_can_be_skipped_named_and_counted(build: Build, write_rows: Any, row: Any, reason: str) -> None:
    path = write_rows([{"prompt": "x", "answer": 1, "id": "a"}, row])
    (report,) = build(path, on_bad_row="skip").reports
    assert (report.num_examples, report.num_bad) == (1, 1)
    assert "train.jsonl line 2: " in report.bad_rows[0]
    assert report.num_rows == report.num_examples + report.num_filtered + report.num_bad


def test_not_utf8_is_a_bad_row(build: Build, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "\xff", "answer": 1}\n')
    with pytest.raises(DataError, match=r"line 2: not UTF-8: byte 0xff at offset 41"):
        build(str(tmp_path / "train.jsonl"))
    assert len(build(str(tmp_path / "train.jsonl"), on_bad_row="skip")) == 1


def test_many_bad_rows_are_counted_and_the_first_five_shown(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": "x", "answer": 1}] + [{"prompt": ""}] * 9)
    with pytest.raises(DataError) as caught:
        build(path)
    assert str(caught.value).count("the prompt is empty") == 5
    assert "9 of 10 rows" in str(caught.value)
    assert "and 4 more" in str(caught.value)


def test_only_bad_rows_is_an_error_even_when_they_may_be_skipped(build: Build, write_rows: Any) -> None:
    for rows in (["{", "}"], [{"prompt": ""}] * 2):
        with pytest.raises(DataError, match="2 of 2 rows"):
            build(write_rows(rows), on_bad_row="skip")


def test_duplicate_ids_across_datasets_name_both_places(build: Build, write_rows: Any) -> None:
    first = write_rows([{"prompt": "x", "answer": 1, "id": "a"}], "one.jsonl")
    second = write_rows([{"prompt": "y", "answer": 1, "id": "a"}], "two.jsonl")
    with pytest.raises(DataError, match=r"two.jsonl line 1: id 'a' was already given to .*one.jsonl line 1"):
        build(first, second)


def test_answers_can_be_optional_and_demonstrations_need_none(build: Build, write_rows: Any) -> None:
    path = write_rows([{"prompt": "x", "completion": "y"}])
    assert len(build({"path": path, "options": {"answer": "optional"}})) == 1
    assert len(build(path, kind=Demonstrations)) == 1


def test_a_mask_is_part_of_the_fingerprint(build: Build, write_rows: Any) -> None:
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    row = {"prompt": chat, "completion": "w"}
    all_turns = build(write_rows([row | {"imitates_prompt": True}]), kind=Demonstrations)
    last = build(write_rows([row]), kind=Demonstrations)
    [example], [last_example] = all_turns, last
    assert last_example.loss_mask is None
    # "y", what the template writes between, "w" and the end-of-sequence token.
    assert example.loss_mask.tolist() == [True] + [False] * len("[user]z[assistant]") + [True, True]
    assert all_turns.datasets[0].fingerprint != last.datasets[0].fingerprint


def test_a_demonstration_needs_a_completion(build: Build, write_rows: Any) -> None:
    with pytest.raises(DataError, match=r"line 1: no completion to imitate \(looked in: completion\)"):
        build(write_rows([{"prompt": "x", "answer": 1}]), kind=Demonstrations)


def test_unknown_format_and_unknown_columns(build: Build, write_rows: Any) -> None:
    path = write_rows([{"text": "x"}])
    with pytest.raises(PluginNotFoundError, match="nosuch"):
        build({"path": path, "format": "nosuch"})
    with pytest.raises(DataError, match=r"line 1: no dataset format fits the columns \['text'\]"):
        build(path)


def test_fingerprint_changes_with_any_token_and_any_id(build: Build, write_rows: Any) -> None:
    def fingerprint(row: dict[str, Any]) -> str:
        examples = build(write_rows([{"prompt": "x", "completion": "y", **row}]), kind=Demonstrations)
        return examples.datasets[0].fingerprint

    prints = [fingerprint(row) for row in ({}, {"prompt": "z"}, {"completion": "z"}, {"id": "z"})]
    assert len(set(prints)) == 4
    assert fingerprint({"answer": 5}) == prints[0]


@pytest.mark.parametrize(
    ("policy", "fate", "num_tokens"), [("text", "encoded as text", 6), ("special", "taken as tokens", 3)]
)
def test_control_tokens_in_rows_are_counted_and_said(
    build: Build, write_rows: Any, tokenizer: Any, policy: str, fate: str, num_tokens: int
) -> None:
    tokenizer.control_token = "</s>"
    rows = [{"prompt": prompt, "answer": 1} for prompt in ("a</s>b", "plain", "</s></s>c")]
    examples = build(write_rows(rows), control_tokens=policy)
    (report,) = examples.reports
    assert (report.num_control_rows, dict(report.control_tokens)) == (2, {"</s>": 2})
    assert f"control tokens are spelled in 2 of 3 rows (</s> in 2): {fate} (data.control_tokens)" in str(report)
    assert report.is_notable
    first = next(iter(examples))
    assert len(first.token_ids) == TEMPLATE_TOKENS + num_tokens


def test_rows_with_control_tokens_can_be_refused(build: Build, write_rows: Any, tokenizer: Any) -> None:
    tokenizer.control_token = "</s>"
    path = write_rows([{"prompt": "plain", "answer": 1}, {"prompt": "a</s>b", "answer": 1}])
    with pytest.raises(DataError, match=r"line 2: the text spells control tokens \(</s>\)"):
        build(path, control_tokens="refuse")
    (report,) = build(path, control_tokens="refuse", on_bad_row="skip").reports
    assert (report.num_examples, report.num_bad) == (1, 1)
