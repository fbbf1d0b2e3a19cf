"""Settings of ``chatlearn plugins check chatlearn-data``; no run imports them."""

from __future__ import annotations

from typing import Any

from chatlearn_core.data import RawExample
from chatlearn_testing.suites import RowCase

CHAT = [{"role": "user", "content": "2+2?"}]
DIALOGUE = [*CHAT, {"role": "assistant", "content": "4"}]
WORKED, BOXED = "It is 4.\n#### 4", r"It is \boxed{4}."
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
    "dataset/gsm8k": {"options": {"instruction": ""}, "cases": (
        RowCase({"question": "2+2?", "answer": WORKED}, RawExample(CHAT, WORKED, "4", "gsm8k")),
        RowCase({"question": "2+2?", "answer": "It is 4."}, None),
    )},
    "dataset/math": {"options": {"instruction": ""}, "cases": (
        RowCase({"problem": "2+2?", "solution": BOXED}, RawExample(CHAT, BOXED, "4", "math")),
        RowCase({"problem": "2+2?", "solution": "It is 4."}, None),
    )},
}  # fmt: skip
