"""Rollouts of two turns through the real engines: what is trained on is what was sampled, and a run resumes exactly."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def two_turns(recipe: Any) -> Any:
    """GRPO whose rollouts an environment makes; the environment judges them, too."""
    recipe.content["roles"].pop("reward")
    recipe.content["roles"]["retry"] = {"kind": "environment", "backend": "retry", "uses": {"policy": "generator"}}
    recipe.content["algorithm"]["options"]["roles"] = {"environment": "retry", "reward": None}
    recipe.content["train"]["steps"] = 2
    recipe.write()
    return recipe


def test_both_turns_are_trained_on_and_nothing_else(two_turns: Any, chatlearn: Any, sums: Path) -> None:
    two_turns.content["data"]["eval"] = [{"path": str(sums), "format": "prompt", "limit": 4}]
    finished = chatlearn("run", two_turns.write())
    assert finished.code == 0, finished.output
    first, last = [json.loads(line) for line in (two_turns.run_dir / "metrics.jsonl").read_text().splitlines()][-2:]
    assert first["samples/trained"] == last["samples/trained"] == 12
    # The trainer's forward over the whole sequence against what the generator said in each turn: other tokens, a
    # shifted mask or logprobs of the hint would all show.
    assert last["mismatch/prob_diff_mean"] < 1e-4
    assert last["mismatch/infinite"] == 0
    assert "eval/reward" in last, "evaluation makes rollouts in the environment, too"
    [row, *_] = [
        json.loads(text) for text in (two_turns.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert row["reward"] == sum(map(str.isalpha, row["completion"])), row


def test_a_killed_run_ends_bit_identical(two_turns: Any, chatlearn: Any, result_of: Any) -> None:
    whole = two_turns.file.parent / "whole"
    assert chatlearn("run", two_turns.file, f"output_dir={whole}").code == 0
    killed = chatlearn("run", two_turns.file, PROBE="update begins:6")  # the second of step 2
    assert killed.code == -signal.SIGKILL, killed.output
    finished = chatlearn("run", two_turns.file)
    assert finished.code == 0, finished.output
    assert result_of(two_turns.run_dir) == result_of(whole)


@pytest.mark.parametrize(
    ("event", "reason", "words"),
    [
        ("raises", "environment_failed", "raised ValueError"),
        ("hangs", "environment_timed_out", "was not finished within"),
    ],
)
def test_one_rollout_that_fails_is_excluded_and_the_run_goes_on(
    event: str, reason: str, words: str, two_turns: Any, chatlearn: Any
) -> None:
    two_turns.content["roles"]["retry"]["timeout_s"] = 2.0
    two_turns.content["train"]["steps"] = 1
    finished = chatlearn("run", two_turns.write(), PROBE=f"environment {event}:2")
    assert finished.code == 0, finished.output
    [line] = [json.loads(line) for line in (two_turns.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line[f"samples/excluded/{reason}"] == 1
    assert line["samples/trained"] == 11
    assert words in finished.output


def test_handles_are_checked_before_anything_starts(two_turns: Any, chatlearn: Any) -> None:
    two_turns.content["roles"]["retry"]["uses"] = {"policy": "trainer"}
    finished = chatlearn("config", "validate", two_turns.write())
    assert finished.code == 2
    assert "it must be a generator; it is a trainer" in finished.output
    two_turns.content["roles"]["retry"]["uses"] = {}
    finished = chatlearn("config", "validate", two_turns.write())
    assert "environment 'retry' needs roles of kind generator for the handles policy" in finished.output


@pytest.mark.thorough
@pytest.mark.slow
def test_on_ray_a_dead_worker_is_rebuilt_and_makes_the_same_rollouts(
    two_turns: Any, chatlearn: Any, tmp_path: Path
) -> None:
    """Two workers, one of which is killed as its third rollout begins; against the local runtime, bit for bit."""
    two_turns.content["train"]["steps"] = 1
    del two_turns.content["roles"]["reference"], two_turns.content["algorithm"]["options"]["kl_coef"]
    two_turns.content["runtime"] = {"backend": "local", "options": {"num_threads": 1}}
    whole = tmp_path / "whole"
    assert chatlearn("run", two_turns.write(), f"output_dir={whole}").code == 0
    marker = tmp_path / "killed"
    probe = {"PROBE": "environment dies:3", "PROBE_MARKER": str(marker)}
    two_turns.content["roles"]["retry"]["replicas"] = 2
    two_turns.content["runtime"] = {"backend": "ray", "options": {"num_threads": 1, "environment": probe}}
    finished = chatlearn("run", two_turns.write())
    assert finished.code == 0, finished.output
    assert int(marker.read_text()) != finished.pid, "it was a process of its own"
    events = [json.loads(line) for line in (two_turns.run_dir / "events.jsonl").read_text().splitlines()]
    [rebuilt] = [event for event in events if event["event"] == "environment_worker_rebuilt"]
    assert (rebuilt["role"], rebuilt["restart"]) == ("retry", 1)

    def sampled(run_dir: Path) -> list[Any]:
        lines = (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        keys = ("id", "token_ids", "reward", "generator_logprobs")
        return [[json.loads(line)[key] for key in keys] for line in lines]

    assert sampled(two_turns.run_dir) == sampled(whole)


AGENT = """
import json, os, sys, urllib.request

messages = json.load(sys.stdin)["messages"]

def ask(model=os.environ["CHATLEARN_MODEL"]):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

first = ask()
ask("judge")  # another generator of the environment
messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
print(sum(map(str.isalpha, ask())))
"""


@pytest.mark.thorough
def test_on_ray_a_black_box_agent_makes_the_rollouts_of_the_local_runtime(
    two_turns: Any, chatlearn: Any, tmp_path: Path
) -> None:
    """A program behind the gateway in workers of their own; bit for bit."""
    content = two_turns.content
    content["train"]["steps"] = 1
    del content["roles"]["reference"], content["algorithm"]["options"]["kl_coef"]
    options = {"command": [sys.executable, "-I", "-c", AGENT], "reward": "agent"}
    uses = {"policy": "generator", "judge": "generator"}
    content["roles"]["retry"] |= {"backend": "agent", "options": options, "uses": uses}
    content["runtime"] = {"backend": "local", "options": {"num_threads": 1}}
    whole = tmp_path / "whole"
    finished = chatlearn("run", two_turns.write(), f"output_dir={whole}")
    assert finished.code == 0, finished.output
    content["runtime"] = {"backend": "ray", "options": {"num_threads": 1}}
    content["roles"]["retry"]["replicas"] = 2
    finished = chatlearn("run", two_turns.write())
    assert finished.code == 0, finished.output
    [line] = [json.loads(line) for line in (two_turns.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert line["samples/trained"] == 12
    assert (line["environment/requests"], line["environment/other_models"]) == (3, 1)
    assert line["mismatch/prob_diff_mean"] < 1e-4

    def sampled(run_dir: Path) -> list[Any]:
        lines = (run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        keys = ("id", "token_ids", "reward", "generator_logprobs")
        return [[json.loads(line)[key] for key in keys] for line in lines]

    assert sampled(two_turns.run_dir) == sampled(whole)
