"""Settings of ``chatlearn plugins check chatlearn-rewards``; no run imports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply, chat_completion
from chatlearn_testing.fakes.role_handle import ScriptedHandle
from chatlearn_testing.suites import FilterCase, RewardCase


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A user's function, for the reward ``function``; ``raise`` makes it fail."""
    if solution_str == "raise":
        raise RuntimeError("broken on purpose")
    return float(solution_str == ground_truth)


@cache
def _server() -> FakeHttpServer:
    """A server of this process that scores completions and judges them; its threads end with the process."""

    def reply(body: Any, number: int) -> HttpReply:
        if "messages" in body:
            return chat_completion(body["messages"][-1]["content"])
        scores = {"good": 1.0, "bad": 0.0, "odd": float("nan")}
        results = [{"id": row["id"], "score": scores.get(row["completion"])} for row in body["samples"]]
        return HttpReply({"results": results})

    return FakeHttpServer(reply).__enter__()


class _ServedOptions(Mapping[str, Any]):
    """Options that hold the server's address; it starts when they are first read."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __getitem__(self, name: str) -> Any:
        return self._make(_server().url)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._make("http://localhost"))

    def __len__(self) -> int:
        return len(self._make("http://localhost"))


ENDPOINT_JUDGE: dict[str, Any] = {
    "options": _ServedOptions(
        lambda url: {
            "endpoint": {"base_url": url, "model": "grader", "retries": 0},
            "labels": {"good": 1.0, "bad": 0.0},
            "template": "{completion}",
        }
    ),
    "cases": (RewardCase("It is good.", 1.0), RewardCase("Bad!", 0.0), RewardCase("I cannot say", None)),
}
"""The judge behind an endpoint, for tests of this distribution: a record has one set of settings."""

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
    "reward/http": {
        "options": _ServedOptions(lambda url: {"url": f"{url}/score", "retries": 0, "batch_size": 2}),
        "cases": (RewardCase("good", 1.0), RewardCase("bad", 0.0), RewardCase("odd", None), RewardCase("new", None)),
    },
    "reward/process": {
        "cases": (
            RewardCase("1 + 1 = 2\n2 * 2 = 5", 0.5),
            RewardCase("no equation", 0.0),
        ),
        "options": {"give": "mean"},
    },
    "reward/model": {
        "handles": {"model": ScriptedHandle(scores=lambda token_ids: float(token_ids[-1]))},
        "cases": (RewardCase("a", 97.0), RewardCase("b", 98.0)),
    },
    "sample_filter/running_normalisation": {
        "options": {"per_data_source": True, "epsilon": 1e-12, "clip": 1.25},
        "cases": (
            FilterCase("right", 1.0, reward=1.0, token_values=(0.5, 0.0, 0.0, 0.0, 0.0)),
            FilterCase("wrong", 0.0, reward=-1.0),
            FilterCase("wordy", 0.0, reward=-0.5773502692, group="other", data_source="style"),
            FilterCase("plain", 0.0, reward=-0.5773502692, group="other", data_source="style"),
            FilterCase("silly", 0.0, reward=-0.5773502692, group="other", data_source="style"),
            FilterCase("short", 4.0, reward=1.25, group="other", data_source="style"),
        ),
        "bad_options": ({"epsilon": 0.0}, {"clip": 0.0}, {"clip": -1.0}),
    },
}
