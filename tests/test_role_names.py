"""Roles beside one another: neither names nor order decide which is the policy, and all use the same token ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.engine

ORDERS = (("helper", "policy", "judge", "sampler"), ("sampler", "judge", "policy", "helper"))


@pytest.fixture
def renamed(recipe: Any, sums: Any) -> Any:
    """Two language models that learn, of which ``policy`` is the policy; nothing is called as in GRPO."""
    roles = recipe.content["roles"]
    recipe.content["algorithm"] = {"name": "renamed", "options": {"group_size": 3}}
    recipe.content["data"]["eval"] = [{"path": str(sums), "format": "prompt", "limit": 4}]
    recipe.content["roles"] = {
        "helper": {"kind": "trainer", "backend": "fsdp", "options": {"learning_rate": 0.05}},
        "policy": roles["trainer"],
        "judge": roles["reward"],
        "sampler": roles["generator"],
    }
    recipe.write()
    return recipe


def test_the_policy_is_synced_evaluated_exported_and_reported(renamed: Any, chatlearn: Any, result_of: Any) -> None:
    results = []
    for index, order in enumerate(ORDERS):
        renamed.content["roles"] = {name: renamed.content["roles"][name] for name in order}
        run_dir = renamed.file.parent / f"run{index}"
        finished = chatlearn("run", renamed.write(), "train.steps=2", f"output_dir={run_dir}")
        assert finished.code == 0, finished.output
        syncs = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        [sync] = [event for event in syncs if event["event"] == "weight_sync"]
        assert (sync["trainer"], sync["generator"]) == ("policy", "sampler")
        exported = load_file(run_dir / "model" / "model.safetensors")
        kept = load_file(run_dir / "checkpoints" / "step_00000002" / "roles" / "policy" / "weights.safetensors")
        assert exported.keys() <= kept.keys()
        assert all(exported[name].equal(kept[name]) for name in exported), "the policy is what is exported"
        results.append(result_of(run_dir))
    assert results[0] == results[1]
    *_, last = results[0].metrics
    assert last["mismatch/prob_diff_mean"] < 1e-4, "the generator samples from the policy, after updates too"
    assert "eval/samples" in last
    assert {"policy/grad_norm", "helper/grad_norm", "policy/ppo_kl", "helper/ppo_kl"} <= last.keys()
    assert last["helper/mismatch/prob_diff_mean"] > 1e-4, "its own, under its own name"


def test_a_role_that_the_algorithm_calls_and_nobody_configured_is_named(renamed: Any, chatlearn: Any) -> None:
    renamed.content["roles"]["trainer"] = renamed.content["roles"].pop("policy")
    finished = chatlearn("config", "validate", renamed.write())
    assert finished.code == 2
    assert "the algorithm needs a role 'policy' of kind trainer" in finished.output


def test_a_role_with_another_tokenizer_is_refused_before_anything_starts(
    recipe: Any, chatlearn: Any, tiny_model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = (token for token, index in vocab.items() if index in (40, 41))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    recipe.content["roles"]["reference"]["model"] = {"path": str(other)}
    finished = chatlearn("run", recipe.write(), "--dry-run")
    assert finished.code == 2, finished.output
    assert "roles.reference.model.path: role 'reference' has another tokenizer than the run" in finished.output
    assert f"2 are not those of {other} (there): id 40 is {first!r} here and {second!r} there" in finished.output
    recipe.content["roles"]["reference"]["model"]["tokenizer"] = str(tiny_model)
    finished = chatlearn("run", recipe.write(), "--dry-run")
    assert finished.code == 0, finished.output
