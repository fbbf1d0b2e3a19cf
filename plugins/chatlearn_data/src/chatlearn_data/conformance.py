"""Settings of ``chatlearn plugins check chatlearn-data``; no run imports them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import ReaderCase, RowCase

CHAT = [{"role": "user", "content": "2+2?"}]
DIALOGUE = [*CHAT, {"role": "assistant", "content": "4"}]
WORKED, BOXED = "It is 4.\n#### 4", r"It is \boxed{4}."
ROWS = [{"prompt": CHAT, "level": 1}, {"prompt": CHAT, "level": 2}]
LINES = b'{"prompt": "2+2?", "answer": 4}\n\n{"prompt": "\xe6\xbc\xa2", "answer": null}'
OF_LINES = ({"prompt": "2+2?", "answer": 4}, {"prompt": "漢", "answer": None})


def write_parquet(path: Path) -> None:
    """Write ``ROWS``."""
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def write_folder(path: Path) -> None:
    """Write the lines as a dataset of one split, which the library of hub datasets loads by the folder's path."""
    path.mkdir()
    (path / "train.jsonl").write_bytes(LINES)


SETTINGS: dict[str, dict[str, Any]] = {
    "dataset/verifiable": {"cases": (
        RowCase({"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, RawExample(CHAT, ground_truth="4")),
        RowCase({"prompt": CHAT, "reward_model": "rule"}, None),
    )},
    "dataset/prompt": {"cases": (
        RowCase({"prompt": "2+2?", "answer": "4", "id": 3}, RawExample("2+2?", ground_truth="4", id="3")),
        RowCase({"prompt": CHAT, "solution": "4"}, RawExample(CHAT, ground_truth="4")),
        RowCase({"prompt": 7}, None),
    )},
    "dataset/keys": {"options": {"input_key": "ask", "label_key": "gold"}, "cases": (
        RowCase({"ask": "2+2?", "gold": "4"}, RawExample("2+2?", ground_truth="4")),
        RowCase({"gold": "4"}, None),
    )},
    "dataset/sft": {"cases": (
        RowCase({"prompt": CHAT, "completion": "4"}, RawExample(CHAT, completion="4")),
        RowCase({"prompt": "2+2?", "completion": 4}, None),
    )},
    "dataset/messages": {"cases": (
        RowCase({"messages": DIALOGUE}, RawExample(CHAT, completion=DIALOGUE[1:], imitates_prompt=True)),
        RowCase({"messages": CHAT}, None),
    )},
    "dataset/preference": {"cases": (
        RowCase(
            {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
            RawExample("2+2?", completion="4", completions=("4", "5"), ranks=(1.0, 0.0)),
        ),
        RowCase({"prompt": "2+2?", "chosen": "4", "rejected": None}, None),
    )},
    "dataset/ranked": {"cases": (
        RowCase(
            {"prompt": "2+2?", "completions": ["4", "5"], "scores": [0.5, 0.25]},
            RawExample("2+2?", completion="4", completions=("4", "5"), ranks=(0.5, 0.25)),
        ),
        RowCase({"prompt": "2+2?", "completions": "45", "scores": [0.5, 0.25]}, None),
    )},
    "dataset/labelled": {"cases": (
        RowCase(
            {"prompt": "2+2?", "completion": "4", "label": True},
            RawExample("2+2?", completion="4", completions=("4",), labels=(True,)),
        ),
        RowCase({"prompt": "2+2?", "completion": "4", "label": None}, None),
    )},
    "dataset/jsonl": {"cases": (
        ReaderCase(LINES, OF_LINES),
        ReaderCase(b'\xef\xbb\xbf{"a": 1}\nno JSON\n[2]\n\xff\n{"a": 5}\n', ({"a": 1}, None, None, None, {"a": 5})),
    )},
    "dataset/json": {"cases": (
        ReaderCase(b"[" + LINES.replace(b"\n\n", b",") + b"]", OF_LINES),
        ReaderCase(LINES, OF_LINES),
        ReaderCase(b'[{"a": 1}, 2]', ({"a": 1}, None)),
        ReaderCase(b'[{"a": 1},', None),
    )},
    "dataset/csv": {"cases": (
        ReaderCase(b'a,b\n1,"x, y"\n2\n3,\n', ({"a": "1", "b": "x, y"}, None, {"a": "3", "b": ""})),
        ReaderCase(b'a,b\n1,"x', None),
    )},
    "dataset/parquet": {"cases": (ReaderCase(write_parquet, ROWS), ReaderCase(b"PAR1 not really", None))},
    "dataset/hub": {"cases": (ReaderCase(write_folder, OF_LINES),)},
    "dataset/gsm8k": {"options": {"instruction": ""}, "cases": (
        RowCase({"question": "2+2?", "answer": WORKED}, RawExample(CHAT, WORKED, "4", "gsm8k")),
        RowCase({"question": "2+2?", "answer": "It is 4."}, None),
    )},
    "dataset/math": {"options": {"instruction": ""}, "cases": (
        RowCase({"problem": "2+2?", "solution": BOXED}, RawExample(CHAT, BOXED, "4", "math")),
        RowCase({"problem": "2+2?", "solution": "It is 4."}, None),
    )},
}  # fmt: skip
