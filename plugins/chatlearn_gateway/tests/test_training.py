"""Whole runs that train on an unmodified agent, on the runtime ``local`` with the generator of transformers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chatlearn_core.config.load import load_config
from chatlearn_core.executor.assembly import assemble
from chatlearn_core.executor.run import Run
from chatlearn_core.plugins.loader import discover_plugins
from chatlearn_hf.tiny import build_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

AGENT = '''
import itertools
import anthropic
import openai

CALLS = itertools.count()
LIVE = []

def solve(base_url, api_key, model, example):
    """Asks, and asks again; the third rollout raises."""
    number = next(CALLS)
    if number == 2:
        raise LookupError("a tool broke")
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = list(example["messages"])
        choice = client.chat.completions.create(model=model, messages=messages, logprobs=True).choices[0]
        assert len(choice.logprobs.content) > 0
        again = {"role": "user", "content": "wrong, try again"}
        messages += [choice.message.model_dump(exclude_none=True), again]
        streaming = client.chat.completions.with_streaming_response
        with streaming.create(model=model, messages=messages, stream=True) as response:
            LIVE.append("content-length" not in response.headers)  # its length is not known yet
            text = "".join(chunk.choices[0].delta.content or "" for chunk in response.parse())
        branch = client.responses.create(model=model, input="and now?", instructions="Say it.")
        assert branch.output_text is not None
        judged = client.chat.completions.create(model="judge", messages=messages, temperature=0.5)
        assert judged.model == "judge"
    root = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=api_key, max_retries=0) as client:
        question = [{"role": "user", "content": "and then?"}]
        tool = {"name": "add", "input_schema": {"type": "object"}}
        with client.messages.stream(model=model, messages=question, max_tokens=5, tools=[tool]) as stream:
            message = stream.get_final_message()
        assert message.usage.output_tokens <= 5
    return sum(map(str.isalpha, text)) / max(1, len(text))
'''


def test_a_run_trains_on_what_an_agent_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "black_box.py").write_text(AGENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    questions = [{"prompt": f"what is {i} plus {i + 1}?", "answer": str(2 * i + 1)} for i in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    content: dict[str, Any] = {
        "name": "test",
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(build_tiny_model(tmp_path / "model", hidden=32, intermediate=64))},
        "data": {"train": [{"path": str(tmp_path / "sums.jsonl"), "format": "prompt"}]},
        "algorithm": {"name": "grpo", "options": {"group_size": 4, "roles": {"environment": "agent", "reward": None}}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.003}},
            "generator": {"kind": "generator", "backend": "transformers"},
            "agent": {
                "kind": "environment",
                "backend": "agent",
                "uses": {"judge": "generator", "policy": "generator"},
                "timeout_s": 60.0,
                "options": {"function": "black_box:solve", "reward": "agent"},
            },
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": 2, "prompts_per_step": 2},
        "checkpoint": {"export": False},
        "log": {"progress": False},
        "runtime": {"options": {"num_threads": 1}},
    }
    registry = discover_plugins()
    run = Run(assemble(load_config(yaml.safe_dump(content), (), registry), registry), observers=registry.observers)
    assert asyncio.run(run.train())["status"] == "completed"
    live = sys.modules["black_box"].LIVE
    assert len(live) == 15
    assert any(live), "text is sent while a turn is sampled, except for turns without text that is certain before"
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first["samples/excluded/environment_failed"] == 1
    assert first["samples/trained"] == 7 * 3, "the conversation of each rollout, and its two branches"
    assert second["samples/trained"] == 8 * 3
    # The trainer's forward over the stitched sequences against what the generator said in each turn: other tokens, a
    # shifted mask or encoding a turn again would all show.
    assert second["mismatch/prob_diff_mean"] < 1e-4
    assert second["mismatch/infinite"] == 0
    lines = (tmp_path / "run" / "rollouts" / "step_000002.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 24
    assert len({row["id"].partition("#")[2].partition("/")[0] for row in rows}) == 4, "each of a group's rollouts"
