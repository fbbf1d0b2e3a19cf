"""``chatlearn data`` from end to end: what is prepared is what the pipeline reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from chatlearn_algorithms.example_kinds import Demonstrations
from chatlearn_chat import ChatTemplateRenderer
from chatlearn_core.config.models import DataConfig
from chatlearn_core.data import ExampleSet, Prompts, build_dataset
from chatlearn_core.exceptions import DataError
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_core.types import Demonstration
from chatlearn_data.answers import last_boxed
from chatlearn_data.arithmetic import check_disjoint, problem_of
from chatlearn_data.cli import app
from chatlearn_hf.tiny import build_tiny_model

PUBLISHED = Path(__file__).parent / "published"


class ByteTokenizer:
    """One token a byte."""

    eos_token_id = 0
    chat_template = "roles"
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte + 1 for byte in range(256)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token - 1 for token in token_ids if token).decode()

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return "".join(f"[{message['role']}]{message['content']}" for message in conversation) + "[assistant]"


def chatlearn_data(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def load(path: Path, kind: Any = Prompts, **fields: Any) -> ExampleSet:
    config = DataConfig.model_validate({"train": [{"path": str(path), **fields}]})
    return build_dataset(
        config,
        ChatTemplateRenderer(ByteTokenizer()),
        discover_plugins(),
        kind=kind(),
        max_prompt_tokens=10**5,
        max_length=2 * 10**5,
    )


@pytest.mark.parametrize("recipe", ["gsm8k", "math"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_prepared_rows_are_equivalent_to_raw_rows(tmp_path: Path, recipe: str, suffix: str) -> None:
    raw, output = PUBLISHED / f"{recipe}.jsonl", tmp_path / f"out{suffix}"
    result = chatlearn_data("prepare", recipe, "--input", raw, "--output", output, "--split", "test")
    assert f"{output}: 5 rows" in result.output.replace("\n", "")
    prepared, direct = list(load(output)), list(load(raw))
    assert [p.text for p in prepared] == [p.text for p in direct]
    assert [p.ground_truth for p in prepared] == [p.ground_truth for p in direct]
    assert [p.id for p in prepared] == [f"{recipe}/test/{i}" for i in range(5)]
    assert {p.data_source for p in prepared} == {recipe}
    assert prepared[3].columns["extra_info"]["index"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"), [("gsm8k/train", 7473), ("gsm8k/test", 1319), ("math/train", 4500), ("math/test", 500)]
)
def test_the_whole_published_files(published_data: Path, tmp_path: Path, name: str, rows: int) -> None:
    """Row counts are those of the publications; MATH-500 carries its answers, which the solutions must agree with."""
    recipe = name.split("/")[0]
    output = tmp_path / "out.parquet"
    chatlearn_data("prepare", recipe, "--input", published_data / f"{name}.jsonl", "--output", output)
    examples = load(output)
    assert len(examples) == rows == len(load(published_data / f"{name}.jsonl"))
    answers = [prompt.ground_truth for prompt in examples]
    if recipe == "gsm8k":
        assert all(float(answer).is_integer() or "." in answer for answer in answers)
    if name == "math/test":
        solutions = [prompt.columns["extra_info"]["solution"] for prompt in examples]
        assert [last_boxed(text) for text in solutions] == answers


def test_bad_rows_stop_the_work_and_nothing_is_written(tmp_path: Path) -> None:
    raw, output = tmp_path / "raw.jsonl", tmp_path / "out.jsonl"
    good = {"question": "Why?", "answer": "#### 1"}
    raw.write_text(
        "\n".join([json.dumps(good), "{", json.dumps({**good, "answer": "one"}), json.dumps({"answer": ""})])
    )
    with pytest.raises(DataError, match=r"(?s)3 of 4 rows.*line 2: not valid JSON.*line 3: no answer.*line 4: column"):
        chatlearn_data("prepare", "gsm8k", "-i", raw, "-o", output)
    assert not output.exists()
    result = chatlearn_data("prepare", "gsm8k", "-i", raw, "-o", output, "--skip-bad-rows")
    assert "1 rows, 3 bad rows skipped" in result.output.replace("\n", "")
    assert len(output.read_text().splitlines()) == 1


def test_missing_and_empty_input(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for name, reason in [("nothing.jsonl", "does not exist"), ("empty.jsonl", "is empty")]:
        with pytest.raises(DataError, match=reason):
            chatlearn_data("prepare", "math", "-i", tmp_path / name, "-o", tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="must end in"):
        chatlearn_data("prepare", "math", "-i", tmp_path / "empty.jsonl", "-o", tmp_path / "out.txt")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_arithmetic_files_are_ready_to_train_on(tmp_path: Path, suffix: str) -> None:
    counts = ["--train", 90, "--validation", 20, "--heldout", 30, "--demonstrations", 80]
    result = chatlearn_data("prepare", "arithmetic", "-o", tmp_path, *counts, "--max-operand", 20, "--suffix", suffix)
    assert "137 problems for training, 20 for validation, 30 held out" in result.output
    sets = {name: load(tmp_path / f"{name}{suffix}") for name in ("train", "validation", "heldout")}
    demonstrations = list(load(tmp_path / f"sft{suffix}", Demonstrations))
    assert [len(examples) for examples in sets.values()] == [90, 20, 30]
    assert len(demonstrations) == 80
    trained = [problem_of(prompt.columns) for prompt in sets["train"]] + [
        problem_of(example.prompt.columns) for example in demonstrations if isinstance(example, Demonstration)
    ]
    seen = {name: [problem_of(prompt.columns) for prompt in sets[name]] for name in ("validation", "heldout")}
    check_disjoint({"train": trained, **seen})


def test_arithmetic_refuses_an_unknown_style(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--answer-style is 'prose'"):
        chatlearn_data("prepare", "arithmetic", "-o", tmp_path, "--answer-style", "prose")


def test_show_describes_how_rows_are_interpreted(tmp_path: Path) -> None:
    shown = chatlearn_data("show", PUBLISHED / "gsm8k.jsonl", "-n", 2).output
    assert shown.count("(format gsm8k)") == 2
    assert "ground truth: 72" in shown
    assert "Natalia sold clips" in shown
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert "bad row: column 'prompt' must be text" in chatlearn_data("show", bad).output


def test_show_lists_turns_and_tools_of_a_row(tmp_path: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
    lines = chatlearn_data("show", tmp_path / "chats.jsonl").output.splitlines()
    assert {"  user: 2+2?", "  completion (assistant): 4", "  tools: add"} <= set(lines)


def test_show_counts_control_tokens(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", hidden=32, intermediate=64)
    file = tmp_path / "rows.jsonl"
    prompts = ["a <|im_end|> b", "plain", [{"role": "user", "content": "<|im_end|><|im_start|>"}]]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    looks = chatlearn_data("show", file, "-n", 2).output
    assert "control tokens are spelled in 1 of 2 rows (<|im_end|> in 1): encoded as text" in looks
    assert "--model PATH" in looks
    counted = chatlearn_data("show", file, "-n", 1, "--model", tmp_path / "model").output
    assert "control tokens are spelled in 2 of 3 rows (<|im_end|> in 2, <|im_start|> in 1)" in counted
    tokenizer = tmp_path / "model" / "tokenizer.json"  # the template writes the token, marked as special or not
    marked, num = re.subn(r'("content": "<\|im_start\|>"[^}]*"special": )true', r"\1false", tokenizer.read_text())
    assert num == 1
    tokenizer.write_text(marked)
    assert chatlearn_data("show", file, "-n", 1, "--model", tmp_path / "model").output == counted


def test_show_handles_any_row_content(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "red \x1b[31m, a bell \a and\nlines"}) + "\n")
    shown = chatlearn_data("show", file).output
    assert "red \\x1b[31m, a bell \\x07 and\nlines" in shown
