"""The suite for dataset formats on every format of this distribution."""

from __future__ import annotations

from typing import Any

import pytest

from chatlearn_core.data import RawExample
from chatlearn_data import plugin
from chatlearn_testing.check import run_conformance
from chatlearn_testing.suites import RowCase

RECORDS = {record.name: record for record in plugin.chatlearn_datasets() if not record.reads}
CHAT = [{"role": "user", "content": "2+2?"}]
DIALOGUE = [*CHAT, {"role": "assistant", "content": "4"}]
WORKED, BOXED = "It is 4.\n#### 4", r"It is \boxed{4}."
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "verifiable": ("verifiable", {"cases": (
        RowCase({"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, RawExample(CHAT, ground_truth="4")),
        RowCase({"prompt": CHAT, "reward_model": "rule"}, None),
    )}),
    "prompt": ("prompt", {"cases": (
        RowCase({"prompt": "2+2?", "answer": "4", "id": 3}, RawExample("2+2?", ground_truth="4", id="3")),
        RowCase({"prompt": CHAT, "solution": "4"}, RawExample(CHAT, ground_truth="4")),
        RowCase({"prompt": 7}, None),
    )}),
    "keys": ("keys", {"options": {"input_key": "ask", "label_key": "gold"}, "cases": (
        RowCase({"ask": "2+2?", "gold": "4"}, RawExample("2+2?", ground_truth="4")),
        RowCase({"gold": "4"}, None),
    )}),
    "sft": ("sft", {"cases": (
        RowCase({"prompt": CHAT, "completion": "4"}, RawExample(CHAT, completion="4")),
        RowCase({"prompt": "2+2?", "completion": 4}, None),
    )}),
    "messages": ("messages", {"cases": (
        RowCase({"messages": DIALOGUE}, RawExample(CHAT, completion=DIALOGUE[1:], imitates_prompt=True)),
        RowCase({"messages": CHAT}, None),
    )}),
    "preference": ("preference", {"cases": (
        RowCase(
            {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
            RawExample("2+2?", completion="4", completions=("4", "5"), ranks=(1.0, 0.0)),
        ),
        RowCase({"prompt": "2+2?", "chosen": "4", "rejected": None}, None),
    )}),
    "ranked": ("ranked", {"cases": (
        RowCase(
            {"prompt": "2+2?", "completions": ["4", "5"], "scores": [0.5, 0.25]},
            RawExample("2+2?", completion="4", completions=("4", "5"), ranks=(0.5, 0.25)),
        ),
        RowCase({"prompt": "2+2?", "completions": "45", "scores": [0.5, 0.25]}, None),
    )}),
    "labelled": ("labelled", {"cases": (
        RowCase(
            {"prompt": "2+2?", "completion": "4", "label": True},
            RawExample("2+2?", completion="4", completions=("4",), labels=(True,)),
        ),
        RowCase({"prompt": "2+2?", "completion": "4", "label": None}, None),
    )}),
    "gsm8k": ("gsm8k", {"options": {"instruction": ""}, "cases": (
        RowCase({"question": "2+2?", "answer": WORKED}, RawExample(CHAT, WORKED, "4", "gsm8k")),
        RowCase({"question": "2+2?", "answer": "It is 4."}, None),
    )}),
    "math": ("math", {"options": {"instruction": ""}, "cases": (
        RowCase({"problem": "2+2?", "solution": BOXED}, RawExample(CHAT, BOXED, "4", "math")),
        RowCase({"problem": "2+2?", "solution": "It is 4."}, None),
    )}),
}  # fmt: skip


def test_every_format_is_tested() -> None:
    assert {name for name, _ in CASES.values()} == set(RECORDS)


@pytest.mark.parametrize("case", CASES)
def test_conforms(case: str) -> None:
    name, settings = CASES[case]
    results = run_conformance([RECORDS[name]], settings={f"dataset/{name}": settings})
    assert results.conforms, "\n".join(f"{verdict.test}: {verdict.reason}" for verdict in results.of("failed"))
