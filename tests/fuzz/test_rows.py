"""Data files with anything in their rows: every row becomes an example, or is bad for a reason; none ends the run."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS_A_FILE = 40
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 1 plus 1?"}]
TURN = {"role": "assistant", "content": "it is 2"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
GOOD: dict[str, list[dict[str, Any]]] = {
    "prompt": [{"prompt": "what is 1 plus 1?", "answer": "2", "id": "a"}, {"prompt": CHAT, "label": 2, "tools": TOOLS}],
    "verifiable": [{"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "data_source": "sums", "extra_info": {}}],
    "sft": [{"prompt": "what is 1?", "completion": "1"}, {"prompt": CHAT, "completion": [TURN]}],
    "messages": [{"messages": [*CHAT, TURN]}, {"messages": [*CHAT, TURN, CHAT[1], TURN], "tools": TOOLS}],
    "preference": [
        {"prompt": CHAT, "chosen": "it is 2", "rejected": "it is 3"},
        {"chosen": [*CHAT, TURN], "rejected": [*CHAT, {"role": "assistant", "content": "no"}]},
    ],
    "ranked": [{"prompt": "what is 1?", "completions": ["1", "2", [TURN]], "scores": [1, 0.5, 0]}],
    "labelled": [{"prompt": "what is 1?", "completion": "1", "label": True}],
    "gsm8k": [{"question": "how many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}],
    "math": [{"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2"}],
    "keys": [{"prompt": "what is 1 plus 1?", "label": "2"}],
    "auto": [{"prompt": "what is 1 plus 1?", "answer": "2"}],
}
INPUTS = {"sft": "demonstrations", "messages": "demonstrations"} | dict.fromkeys(
    ("preference", "ranked", "labelled"), "preferences"
)
PIECES = [
    "<|im_end|>",
    "<|im_start|>",
    "assistant\n",
    "system\n",
    "\n",
    " ",
    "\0",
    "\x1b[31m",
    "é",
    "汉",
    "\u202e",
    "x",
]
VALUES: list[Any] = [
    *(None, True, 0, -1, 3.5, 1e308, 10**30, "", " ", "\n", "\0", "x", "\u2028", "\ufeff", [], {}, [[]], [None], [1]),
    *("a" * 3_000, "汉" * 2_000, " " * 3_000, "{{ messages }}", "{% for %}", "<|im_end|>", [CHAT], CHAT[0], CHAT, TURN),
    *([{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": None}]),
    *([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], [TURN], [TURN, *CHAT]),
    *([{"role": "tool", "content": {"a": 1}}], [{"role": "user<|im_end|>", "content": "x"}], ["user", "x"]),
]


def anything(draw: random.Random, depth: int = 3) -> Any:
    """A value that JSON can hold."""
    kind = draw.randrange(8 if depth else 5)
    if kind < 3:
        return "".join(draw.choices(PIECES, k=draw.randrange(8)))
    if kind < 5:
        return draw.choice(VALUES)
    if kind < 6:
        return [anything(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(["role", "content", "text", "a", "<|im_end|>"]): anything(draw, depth - 1) for _ in range(3)}


def spoiled(value: Any, draw: random.Random) -> Any:
    """The value with something else somewhere in it."""
    if draw.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return anything(draw)
    if isinstance(value, dict):
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {name: child for name, child in value.items() if name != key}
        return value | {key: spoiled(value[key], draw)}
    place = draw.randrange(len(value))
    return [*value[:place], spoiled(value[place], draw), *value[place + 1 :]]


def nested(depth: int) -> str:
    return '{"prompt": ' + "[" * depth + "]" * depth + ', "answer": "2"}'


def write_json_lines(file: Path, rows: list[Any], draw: random.Random) -> None:
    lines = [json.dumps(row, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass") for row in rows]
    odd = [
        *(
            b"",
            b"{",
            b"null",
            b"[]",
            b'"x"',
            b"\xff\xfe{}",
            b'{"prompt": "\\ud83d", "answer": "2"}',
            b"\0" * 10,
            b"NaN",
        ),
        *(b'{"prompt": "a", "prompt": "b", "answer": "1"}', b'{"prompt": 1e400, "answer": NaN}', nested(900).encode()),
        *(nested(200_000).encode(), b'{"prompt": "' + b"9" * 6_000 + b'", "answer": ' + b"9" * 6_000 + b"}"),
    ]
    for _ in range(3):
        lines.insert(draw.randrange(len(lines) + 1), draw.choice(odd))
    file.write_bytes(draw.choice([b"\n", b"\r\n"]).join(lines))


def write_json(file: Path, rows: list[Any], draw: random.Random) -> None:
    file.write_text(json.dumps(rows))


def write_csv(file: Path, rows: list[Any], draw: random.Random) -> None:
    names = sorted({name for row in rows if isinstance(row, dict) for name in row if "\0" not in name}) or ["prompt"]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        for row in rows:
            texts = [str(row.get(name, "")) if isinstance(row, dict) else "x" for name in names]
            writer.writerow([text.replace("\0", "") for text in texts][: draw.choice([len(names), len(names), 1])])


def write_parquet(file: Path, rows: list[Any], draw: random.Random) -> None:
    """Columns as Arrow can type them; what it cannot becomes text."""
    rows = [row for row in rows if isinstance(row, dict)] or [{"prompt": "x"}]
    names = sorted({name for row in rows for name in row})
    columns: dict[str, Any] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            columns[name] = pa.array([None if value is None else str(value) for value in values])
    pq.write_table(pa.table(columns), file)


WRITERS: dict[str, Callable[[Path, list[Any], random.Random], None]] = {
    ".jsonl": write_json_lines,
    ".json": write_json,
    ".csv": write_csv,
    ".parquet": write_parquet,
}


def test_every_row_is_an_example_or_bad_for_a_reason(
    cases: Any, tiny_model: Path, tmp_path: Path, bounded: Any
) -> None:
    examples = 0
    for case in cases(quick=16):
        draw = case.random
        name = draw.choice(list(GOOD))
        rows: list[Any] = []
        for _ in range(ROWS_A_FILE):
            row = draw.choice(GOOD[name])
            rows.append(row if draw.random() < 0.3 else spoiled(row, draw))
        suffix = draw.choice([".jsonl", ".jsonl", *WRITERS])
        file = tmp_path / f"rows{suffix}"
        WRITERS[suffix](file, [row for row in rows if isinstance(row, dict)] if suffix == ".csv" else rows, draw)
        order = {"path": str(file), "format": name, "input": INPUTS.get(name, "prompts"), "model": str(tiny_model)}
        outcome = bounded("row_target.py:read", order | {"show": draw.random() < 0.5}, timeout_s=60)
        told = f"{name} {suffix}\n{outcome.output:.6000}\n{outcome.value}"
        assert outcome.end == "returned", told
        value = outcome.value
        assert "refused" in value or (value["accounted"] and not value["forged"]), told
        examples += value.get("examples", 0)
    assert examples, "some rows are good"
