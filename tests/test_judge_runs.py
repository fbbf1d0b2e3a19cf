"""Remote judges and rewards through whole runs: nonsense is excluded and counted, refused access ends the run, and a
killed run resumes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply, chat_completion

pytestmark = pytest.mark.engine


def judged_by(server: FakeHttpServer) -> dict[str, Any]:
    endpoint = {"base_url": server.url, "model": "grader", "backoff_s": 0.01}
    options = {"endpoint": endpoint, "template": "{completion}", "retries": 0}
    return {"kind": "reward", "backend": "judge", "options": options}


def length_of_the_answer(body: Any, number: int) -> HttpReply:
    return chat_completion(f"Score: {len(body['messages'][-1]['content'])}")


GRPO = ("grpo", {"group_size": 3, "kl_coef": 0.01})
RLAIF = ("online_dpo", {"group_size": 3})


def rollouts(run_dir: Path, step: int) -> list[Any]:
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_killed_run_with_normalised_verdicts_ends_bit_identical(recipe: Any, chatlearn: Any, result_of: Any) -> None:
    """The cache of answers and the moments of rewards are the run's, too."""
    whole = recipe.file.parent / "whole"
    with FakeHttpServer(length_of_the_answer) as server:
        recipe.content["roles"]["reward"] = judged_by(server)
        recipe.content["rollout"] = {"filters": [{"name": "running_normalisation", "options": {"clip": 2.0}}]}
        recipe.content["train"]["steps"] = 3
        recipe.write()
        assert chatlearn("run", recipe.file, f"output_dir={whole}", NO_PROXY="127.0.0.1").code == 0
        killed = chatlearn("run", recipe.file, PROBE="update begins:6", NO_PROXY="127.0.0.1")  # in step 2
        assert killed.code == -signal.SIGKILL, killed.output
        finished = chatlearn("run", recipe.file, NO_PROXY="127.0.0.1")
    assert finished.code == 0, finished.output
    assert result_of(recipe.run_dir) == result_of(whole)
    seen: list[float] = []
    for step in (1, 2, 3):
        rows = rollouts(whole, step)
        seen += [row["reward_components"]["as_scored"] for row in rows]
        mean = sum(seen) / len(seen)
        std = (sum((value - mean) ** 2 for value in seen) / len(seen)) ** 0.5
        for row in rows:
            expected = (row["reward_components"]["as_scored"] - mean) / (std + 1e-8)
            assert row["reward"] == pytest.approx(max(-2.0, min(2.0, expected)), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("runtime", "algorithm"),
    [("local", GRPO), ("local", RLAIF), pytest.param("ray", GRPO, marks=pytest.mark.thorough)],
    ids=["grpo-local", "online_dpo-local", "grpo-ray"],
)
def test_a_judge_that_answers_nonsense_is_a_counted_exclusion(
    recipe: Any, chatlearn: Any, runtime: str, algorithm: tuple[str, dict[str, Any]]
) -> None:
    """Online DPO from a judge's verdicts is RLAIF."""

    def reply(body: Any, number: int) -> HttpReply:
        content = body["messages"][-1]["content"]
        return chat_completion("I like turtles") if len(content) % 2 else length_of_the_answer(body, number)

    with FakeHttpServer(reply) as server:
        recipe.content["roles"]["reward"] = judged_by(server)
        recipe.content["algorithm"] = {"name": algorithm[0], "options": algorithm[1]}
        recipe.content["runtime"] = {"backend": runtime, "options": {"num_threads": 1}}
        recipe.content["train"]["steps"] = 1
        finished = chatlearn("run", recipe.write(), NO_PROXY="127.0.0.1")
    assert finished.code == 0, finished.output
    rows = rollouts(recipe.run_dir, 1)
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(failed) < len(rows)
    line = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()][-1]
    assert line["samples/excluded/reward_failed"] == len(failed)
    assert line["samples/trained"] > 0
    assert line["policy/grad_norm"] > 0
    assert "the judge gave no verdict, but 'I like turtles'" in finished.output


NO_KEY = ("http", 401, "/score", "the environment variable SCORER_KEY must have a key that the endpoint accepts")
NO_PAGE = ("judge", 404, "/chat/completions", "correct the options endpoint.base_url and endpoint.model")


@pytest.mark.parametrize(
    ("runtime", "refusal"),
    [("local", NO_KEY), ("local", NO_PAGE), pytest.param("ray", NO_KEY, marks=pytest.mark.thorough)],
    ids=["http-local", "judge-local", "http-ray"],
)
def test_a_server_that_refuses_access_ends_the_run_although_others_were_scored(
    recipe: Any, chatlearn: Any, runtime: str, refusal: tuple[str, int, str, str]
) -> None:
    """Excluding the refused samples alone would let the run go on: every second request is answered."""
    backend, status, path, remedy = refusal

    def reply(body: Any, number: int) -> HttpReply:
        if number % 2:
            return HttpReply({"error": "sk-secret"}, status)
        if backend == "judge":
            return length_of_the_answer(body, number)
        return HttpReply({"results": [{"id": row["id"], "score": len(row["completion"])} for row in body["samples"]]})

    with FakeHttpServer(reply) as server:
        role = judged_by(server)
        if backend == "http":
            options = {"url": f"{server.url}{path}", "api_key_env": "SCORER_KEY", "batch_size": 1}
            role = {"kind": "reward", "backend": "http", "options": options}
        recipe.content["roles"]["reward"] = role
        recipe.content["runtime"] = {"backend": runtime, "options": {"num_threads": 1}}
        finished = chatlearn("run", recipe.write(), NO_PROXY="127.0.0.1", SCORER_KEY="sk-secret")
        expected = f"reward '{backend}' of role 'reward': {server.url}{path} "
    assert finished.code == 2, finished.output
    assert expected in finished.output
    assert f"HTTP status {status}" in finished.output
    assert remedy in finished.output
    assert ("sk-secret" in finished.output) == (backend == "judge"), "a key is not shown"
    assert not list((recipe.run_dir / "rollouts").glob("*")), "the run ends in its first step"
