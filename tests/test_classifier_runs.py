"""A reward model that vLLM serves, in whole runs: rewards equal those of transformers, and it samples nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture
def scored(recipe: Any, tmp_path: Path) -> Any:
    """GRPO whose reward is the score of a classifier with a tokenizer of its own."""
    from chatlearn_hf.tiny import build_tiny_classifier, build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(400, ["another corpus altogether, of other words"] * 3)
    build_tiny_classifier(tmp_path / "scorer", hidden=128, seed=6, tie=False, tokenizer=tokenizer)
    content = recipe.content
    content["roles"]["scorer"] = {
        "kind": "generator",
        "backend": "vllm",
        "model": {"path": str(tmp_path / "scorer")},
        "options": {"runner": "classify", "num_threads": 1},
        "engine": {"kv_cache_memory_bytes": 64 << 20},
    }
    content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "model",
        "uses": {"model": "scorer"},
        "options": {"input": "text"},
    }
    content["train"]["steps"] = 1
    recipe.write()
    return recipe


@pytest.mark.slow
def test_rewards_are_the_scores_of_transformers(scored: Any, chatlearn: Any) -> None:
    import torch
    from transformers import AutoTokenizer

    from chatlearn_hf.plain_forward import load_plain_classifier

    finished = chatlearn("run", scored.file)
    assert finished.code == 0, finished.output
    lines = (scored.run_dir / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 12
    directory = scored.content["roles"]["scorer"]["model"]["path"]
    plain = load_plain_classifier(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    policy = AutoTokenizer.from_pretrained(scored.content["model"]["path"])
    before, _, after = policy.apply_chat_template(
        [{"role": "user", "content": "PLACE"}], tokenize=False, add_generation_prompt=True
    ).partition("PLACE")
    for row in rows:
        question = row["prompt"].removeprefix(before).removesuffix(after)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["completion"]}]
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n")
        with torch.no_grad():
            expected = float(plain(torch.tensor(tokenizer.encode(text, add_special_tokens=False))))
        assert row["reward"] == pytest.approx(expected, abs=1e-4), row["id"]
    assert len({row["reward"] for row in rows}) > 1


def test_a_classifier_is_not_asked_to_sample(scored: Any, chatlearn: Any) -> None:
    content = scored.content
    roles = content["roles"]

    def problem() -> str:
        refused = chatlearn("config", "validate", scored.write())
        assert refused.code == 2, refused.output
        return " ".join(refused.output.split())

    roles["reward"] |= {"backend": "judge", "uses": {"judge": "scorer"}, "options": {}}
    assert (
        "roles.reward.uses.judge is 'scorer': this reward lets it sample or score tokens, but with its options "
        "generator 'vllm' serves a sequence classifier"
    ) in problem()

    roles["reward"] |= {"backend": "model", "uses": {"model": "scorer"}, "options": {"input": "text"}}
    whole = roles["scorer"].pop("model")
    assert "roles.scorer serves a sequence classifier with its options, but has no model of its own" in problem()

    roles["generator"] |= {"backend": "vllm", "options": {"runner": "classify"}, "model": whole}
    roles["reward"] = {"kind": "reward", "backend": "letters"}
    del roles["scorer"]
    assert "lets role 'generator' sample, but with its options generator 'vllm' serves a sequence" in problem()
