"""A GRPO run small enough for a test: an untrained two-layer model, a reward of the user's own, three steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from chatlearn_hf.tiny import build_tiny_model, build_tiny_tokenizer

STEPS = 3
REWARD = '''
"""A plain function in the user's directory, next to a module of the user's own."""
from alphabet import SIZE


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % SIZE / SIZE
'''


def write_run(directory: Path) -> Path:
    """Model, prompts, reward and configuration; returns the configuration's path."""
    prompts = [f"How much is {a} plus {a + 3}? Answer: " for a in range(4 * STEPS)]
    tokenizer = build_tiny_tokenizer(256, prompts)
    model = build_tiny_model(
        directory / "model", "qwen3", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64, tokenizer=tokenizer
    )
    rows = [{"id": f"p{i}", "prompt": text, "ground_truth": "7"} for i, text in enumerate(prompts)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "alphabet.py").write_text("SIZE = 7\n")
    (directory / "score.py").write_text(REWARD)
    device = {"device": "cpu"}
    config: dict[str, Any] = {
        "name": "small",
        "output_dir": str(directory / "run"),
        "model": {"path": str(model)},
        "data": {
            "train": [{"path": str(directory / "prompts.jsonl"), "format": "prompt"}],
            "apply_chat_template": False,
        },
        "algorithm": {"name": "grpo", "options": {"group_size": 4}},
        "roles": {
            "trainer": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 1e-3}, **device},
            "generator": {"kind": "generator", "backend": "transformers", **device},
            "reward": {
                "kind": "reward",
                "backend": "function",
                "options": {"path": "score.py:compute_score", "num_workers": 1},
            },
        },
        "sampling": {"max_tokens": 8},
        "train": {"steps": STEPS, "prompts_per_step": 4, "mini_batches": 2},
        "checkpoint": {"every": 1},
        "log": {"rollouts": 0, "progress": False},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
