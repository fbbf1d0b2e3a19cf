"""Rewards that call other roles, through the real engines: a judge, a reward model, and both beside a rule."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def judged(recipe: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GRPO whose rewards are a judge's word, a reward model's score and a rule, added up.

    The reward model has a tokenizer of its own. The random judge says no words, so labels are letters of its gibberish.
    """
    from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("models")
    judge = build_tiny_model(folder / "judge", hidden=32, intermediate=64, seed=5)
    tokenizer = build_tiny_tokenizer(400, ["another corpus altogether, of other words"] * 3)
    scorer = build_tiny_model(folder / "scorer", hidden=32, intermediate=64, seed=6, tie=False, tokenizer=tokenizer)
    roles = recipe.content["roles"]
    roles["judge"] = {"kind": "generator", "backend": "watched", "model": {"path": str(judge)}}
    roles["scorer"] = {"kind": "trainer", "backend": "fsdp", "head": "reward", "model": {"path": str(scorer)}}
    labels = {letter: float(index) for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")}
    options = {"labels": labels, "template": "{prompt} {completion}", "max_tokens": 12, "nonsense_value": -1.0}
    roles["reward"] = {
        "kind": "reward",
        "parts": [
            {"backend": "judge", "uses": {"judge": "judge"}, "weight": 0.1, "options": options},
            {"backend": "model", "uses": {"model": "scorer"}, "weight": 0.5, "options": {"input": "text"}},
            {"backend": "letters"},
        ],
    }
    recipe.content["train"]["steps"] = 2
    recipe.write()
    return recipe


def rollouts(run_dir: Path, step: int) -> list[Any]:
    lines = (run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_judge_a_reward_model_and_a_rule_are_added_up(judged: Any, chatlearn: Any, sums: Path) -> None:
    judged.content["data"]["eval"] = [{"path": str(sums), "format": "prompt", "limit": 4}]
    finished = chatlearn("run", judged.write())
    assert finished.code == 0, finished.output
    last = [json.loads(line) for line in (judged.run_dir / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["samples/trained"] == 12
    assert "eval/reward" in last
    for row in rollouts(judged.run_dir, 2):
        parts = row["reward_components"]
        total = 0.1 * parts["judge"] + 0.5 * parts["model"] + parts["letters"]
        assert row["reward"] == pytest.approx(total, abs=1e-6)
        assert parts["score"] == parts["model"]
    assert len({row["reward_components"]["model"] for row in rollouts(judged.run_dir, 2)}) > 6
    shown = chatlearn("flow", judged.file)
    assert "uses judge, scorer" in shown.output


def test_a_killed_run_ends_bit_identical(judged: Any, chatlearn: Any, result_of: Any) -> None:
    whole = judged.file.parent / "whole"
    assert chatlearn("run", judged.file, f"output_dir={whole}").code == 0
    killed = chatlearn("run", judged.file, PROBE="update begins:6")  # the second of step 2
    assert killed.code == -signal.SIGKILL, killed.output
    finished = chatlearn("run", judged.file)
    assert finished.code == 0, finished.output
    assert result_of(judged.run_dir) == result_of(whole)


def test_where_all_models_share_memory_each_has_its_turn(judged: Any, chatlearn: Any) -> None:
    """The judge's lease lasts from the last completion to the last verdict."""
    apart = judged.file.parent / "apart"
    judged.content["train"]["steps"] = 1
    assert chatlearn("run", judged.write(), f"output_dir={apart}").code == 0
    judged.content["memory"] = {"offload": "always"}
    finished = chatlearn("run", judged.write())
    assert finished.code == 0, finished.output
    assert [row["reward"] for row in rollouts(judged.run_dir, 1)] == [row["reward"] for row in rollouts(apart, 1)]
    moves = [json.loads(line) for line in (judged.run_dir / "trace.jsonl").read_text().splitlines()]
    assert any(entry.get("role") == "judge" and "onload" in json.dumps(entry) for entry in moves)


def test_what_cannot_work_is_refused_before_anything_starts(judged: Any, chatlearn: Any) -> None:
    parts = judged.content["roles"]["reward"]["parts"]

    def problem() -> str:
        finished = chatlearn("config", "validate", judged.write())
        assert finished.code == 2, finished.output
        return str(finished.output)

    parts[0]["uses"] = {"judge": "jugde"}
    assert "is 'judge' meant?" in problem()
    parts[0]["uses"] = {"judge": "reward"}
    assert "a cycle, reward -> reward" in problem()
    parts[0]["uses"] = {"judge": "scorer"}
    assert "so it must be a generator; it is a trainer" in problem()
    parts[0]["uses"] = {"judge": "judge"}
    judged.content["roles"]["scorer"]["head"] = "value"
    assert "needs the head 'reward', and roles.scorer.head is 'value'" in problem()
    judged.content["roles"]["scorer"]["head"] = "reward"
    parts[1]["options"] = {"input": "tokens"}
    finished = chatlearn("run", judged.write(), "--dry-run")
    assert finished.code == 2
    assert "role 'scorer' has another tokenizer than the run" in finished.output


@pytest.mark.slow
def test_on_ray_the_rewards_are_the_same(judged: Any, chatlearn: Any) -> None:
    judged.content["train"]["steps"] = 1
    del judged.content["roles"]["reference"], judged.content["algorithm"]["options"]["kl_coef"]
    rewards = []
    for runtime in ("local", "ray"):
        run_dir = judged.file.parent / runtime
        judged.content["runtime"] = {"backend": runtime, "options": {"num_threads": 1}}
        finished = chatlearn("run", judged.write(), f"output_dir={run_dir}")
        assert finished.code == 0, finished.output
        rewards.append([(row["token_ids"], row["reward"]) for row in rollouts(run_dir, 1)])
    assert rewards[0] == rewards[1]


def test_a_remote_judge_gives_the_rewards_and_its_key_is_written_nowhere(recipe: Any, chatlearn: Any) -> None:
    from chatlearn_testing.fakes.http_server import FakeHttpServer, HttpReply, chat_completion

    def reply(body: Any, number: int) -> HttpReply:
        """The length of the question, after one refusal."""
        return chat_completion(f"Score: {len(body['messages'][-1]['content'])}") if number else HttpReply({}, 429)

    with FakeHttpServer(reply) as server:
        endpoint = {"base_url": server.url, "model": "grader", "api_key_env": "JUDGE_KEY", "backoff_s": 0.01}
        options = {"endpoint": endpoint, "template": "{completion}", "nonsense_value": -1.0}
        recipe.content["roles"]["reward"] = {"kind": "reward", "backend": "judge", "options": options}
        recipe.content["train"]["steps"] = 2
        finished = chatlearn("run", recipe.write(), JUDGE_KEY="sk-very-secret", NO_PROXY="127.0.0.1")
    assert finished.code == 0, finished.output
    rows = [row for step in (1, 2) for row in rollouts(recipe.run_dir, step)]
    asked = {float(len(body["messages"][-1]["content"])) for _, _, body in server.requests}
    assert {row["reward"] for row in rows} == asked
    assert "sk-very-secret" not in finished.output
    for file in recipe.run_dir.rglob("*"):
        assert file.is_dir() or b"sk-very-secret" not in file.read_bytes(), file
