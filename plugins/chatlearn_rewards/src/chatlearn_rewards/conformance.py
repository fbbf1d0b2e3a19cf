"""Settings of ``chatlearn plugins check chatlearn-rewards``; no run imports them."""

from __future__ import annotations

from typing import Any

from chatlearn_testing.fakes.role_handle import ScriptedHandle
from chatlearn_testing.suites import RewardCase


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A user's function, for the reward ``function``; ``raise`` makes it fail."""
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    return float(solution_str == ground_truth)


SETTINGS: dict[str, dict[str, Any]] = {
    "reward/math": {
        "options": {"num_workers": 1},
        "cases": (
            RewardCase("The answer is \\boxed{\\frac{1}{2}}.", 1.0, ground_truth="0.5"),
            RewardCase("The answer is \\boxed{3}.", 0.0, ground_truth="4"),
        ),
    },
    "reward/gsm8k": {
        "cases": (
            RewardCase("3 + 4 = 7\n#### 7", 1.0, ground_truth="7"),
            RewardCase("#### 8", 0.0, ground_truth="7"),
        ),
    },
    "reward/format": {
        "options": {"pattern": "<think>.*</think>.*", "num_workers": 1},
        "cases": (RewardCase("<think>a</think>b", 1.0), RewardCase("b", 0.0)),
    },
    "reward/function": {
        "options": {"path": "chatlearn_rewards.conformance:exact_match", "num_workers": 1},
        "cases": (
            RewardCase("yes", 1.0, ground_truth="yes"),
            RewardCase("no", 0.0, ground_truth="yes"),
            RewardCase("raise", None),
        ),
    },
    "reward/multiple_choice": {
        "cases": (
            RewardCase("The answer is (B).", 1.0, ground_truth="B"),
            RewardCase("The answer is A or B.", 0.0, ground_truth="B"),
            RewardCase("A", None, ground_truth="none"),
        ),
    },
    "reward/exact_match": {
        "options": {"ignore_case": True},
        "cases": (
            RewardCase("paris", 1.0, ground_truth="Paris"),
            RewardCase("Rome", 0.0, ground_truth="Paris"),
            RewardCase("Rome", None),
        ),
    },
    "reward/fuzzy_match": {
        "options": {"num_workers": 1},
        "cases": (
            RewardCase("abcd", 0.75, ground_truth="bcde"),
            RewardCase("xyz", 0.0, ground_truth="abc"),
            RewardCase("Rome", None),
        ),
    },
    "reward/json_schema": {
        "options": {"num_workers": 1},
        "cases": (
            RewardCase('{"a": 1}', 1.0, ground_truth={"type": "object"}),
            RewardCase("[]", 0.0, ground_truth={"type": "object"}),
            RewardCase("[]", None, ground_truth={"type": "tree"}),
        ),
    },
    "reward/length": {
        "options": {"maximum": 3, "band": 1},
        "cases": (RewardCase("abc", 1.0), RewardCase("abcd", 0.5), RewardCase("abcdef", 0.0)),
    },
    "reward/repetition": {
        "options": {"n": 1},
        "cases": (RewardCase("a b c", 0.0), RewardCase("a a a a", -0.75)),
    },
    "reward/code": {
        "options": {"num_workers": 1},
        "cases": (
            RewardCase(
                "```python\nprint(int(input()) + 1)\n```", 1.0, ground_truth={"inputs": ["1"], "outputs": ["2"]}
            ),
            RewardCase("```python\ndef f(x):\n    return x\n```", 0.0, ground_truth=["assert f(1) == 2"]),
            RewardCase("```python\npass\n```", None, ground_truth="no tests"),
        ),
    },
    "reward/judge": {
        "options": {"labels": {"good": 1.0, "bad": 0.0}, "template": "{completion}"},
        "handles": {"judge": ScriptedHandle(lambda prompt, sampling: prompt)},
        "cases": (
            RewardCase("It is good.", 1.0),
            RewardCase("Bad!", 0.0),
            RewardCase("I cannot say", None),
        ),
    },
    "reward/model": {
        "handles": {"model": ScriptedHandle(scores=lambda token_ids: float(token_ids[-1]))},
        "cases": (RewardCase("a", 97.0), RewardCase("b", 98.0)),
    },
}
