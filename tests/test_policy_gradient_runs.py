"""Every policy-gradient algorithm trains a tiny model on the local runtime; PPO resumes with its controller's state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chatlearn_algorithms.plugin import chatlearn_algorithms

pytestmark = pytest.mark.engine

CRITIC = {"critic": {"kind": "trainer", "backend": "fsdp", "head": "value", "options": {"learning_rate": 0.003}}}
KL = {"kl_coef": 0.1}

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"group_size": 3, "kl_coef": 0.1, "kl_estimator": "full", "kl_top_k": 8},
    "dr_grpo": {"group_size": 3},
    "dapo": {"group_size": 3, "overlong_buffer": 4},
    "gspo": {"group_size": 3, "drop_zero_spread_groups": True, "dynamic_sampling": True, "overlong_buffer": 4},
    "cispo": {"group_size": 3, **KL},
    "gdpo": {"group_size": 3, "rewards": {"letters": 1.0, "format": 0.5}},
    "rloo": {"group_size": 3, **KL, "kl_estimator": "full", "kl_top_k": 8},
    "reinforce_pp": {**KL},
    "reinforce_pp_baseline": {"group_size": 3, **KL},
    "maxrl": {"group_size": 3},
    "ppo": {**KL, "critic_epochs": 3},
    "decoupled_ppo": {},
}
SHOWN = {
    "grpo": "policy/kl_loss",
    "dapo": "reward_shaping",
    "gspo": "reward_shaping",
    "cispo": "policy/reference_kl",
    "gdpo": "reward/format",
    "rloo": "reward_kl",
    "reinforce_pp": "reward_kl",
    "ppo": "critic/value_error",
    "decoupled_ppo": "policy/importance_weight",
}


def test_every_policy_gradient_has_a_run():
    others = {"sft"}
    names = {spec.name for spec in chatlearn_algorithms() if spec.factory.split(":")[0].split(".")[1] not in others}
    assert set(RUNS) <= names


def lines_of(recipe: Any) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]


def set_up(recipe: Any, name: str, **options: Any) -> None:
    recipe.content["algorithm"] = {"name": name, "options": options}
    if not options.get("kl_coef"):
        del recipe.content["roles"]["reference"]
    if name.endswith("ppo"):
        recipe.content["roles"] |= CRITIC
    if name == "gdpo":
        parts = [
            {"backend": "letters"},
            {"backend": "format", "options": {"pattern": "[aeiou]", "match": "search"}, "weight": 0.5},
        ]
        recipe.content["roles"]["reward"] = {"kind": "reward", "parts": parts}


@pytest.mark.parametrize("name", RUNS)
def test_one_step(recipe, chatlearn, name):
    set_up(recipe, name, **RUNS[name])
    recipe.content["train"] = {"steps": 1, "prompts_per_step": 4, "mini_batches": 2}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [line] = lines_of(recipe)
    assert line["samples/trained"] >= 4
    assert line["policy/grad_norm"] > 0
    assert line["training/updates"] == (8 if name == "ppo" else 4 if name == "decoupled_ppo" else 2)
    assert line.get(SHOWN.get(name, "reward")) is not None, SHOWN.get(name)
    assert (recipe.run_dir / "model" / "model.safetensors").is_file()


def test_the_critic_warms_up_before_the_policy_moves(recipe, chatlearn):
    set_up(recipe, "ppo", critic_warmup_steps=1)
    recipe.content["train"] = {"steps": 2, "prompts_per_step": 4}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    first, second = lines_of(recipe)
    assert "policy/grad_norm" not in first
    assert first["critic/grad_norm"] > 0
    assert second["policy/grad_norm"] > 0


def test_ppo_killed_and_resumed_is_bit_identical(recipe, chatlearn, result_of):
    """Critic, its optimizer and the KL's coefficient go on where they were."""
    set_up(recipe, "ppo", kl_coef=0.1, kl_target=0.01, kl_horizon=8)
    recipe.content["train"] = {"steps": 3, "prompts_per_step": 4}
    recipe.write()
    finished = chatlearn("run", recipe.file, f"output_dir={recipe.file.parent / 'undisturbed'}")
    assert finished.code == 0, finished.output
    expected = result_of(recipe.file.parent / "undisturbed")
    assert chatlearn("run", recipe.file, PROBE="update:3").code == -9
    resumed = chatlearn("run", recipe.file)
    assert resumed.code == 0, resumed.output
    assert result_of(recipe.run_dir) == expected
    coefficients = [line["kl_coef"] for line in expected.metrics]
    assert coefficients[0] == 0.1
    assert len(set(coefficients)) == 3, "it moved in every step, and after the resume from where it was"


def test_dynamic_sampling_draws_others_for_groups_without_spread(recipe, chatlearn):
    """Rewards of 0 or 1, often equal in a group: a refill, excluded groups and their tokens."""
    set_up(recipe, "dapo", group_size=2)
    recipe.content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "format",
        "options": {"pattern": "[aeiou]", "match": "search"},
    }
    recipe.content["train"] = {"steps": 1, "prompts_per_step": 6}
    recipe.content["rollout"] = {"max_refills": 1}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [line] = lines_of(recipe)
    assert line["rollout/refills"] == 1
    assert line["samples/excluded/zero_spread_group"] > 0
    assert line["rollout/discarded_tokens"] >= line["rollout/discarded_tokens/zero_spread_group"] > 0
    assert line["samples/trained"] > 0


def test_what_dynamic_sampling_draws_too_much_waits_for_the_next_step(recipe, chatlearn):
    set_up(recipe, "dapo", group_size=2, oversampling=20.0, importance_correction="truncate")
    recipe.content["roles"]["reward"] = {
        "kind": "reward",
        "backend": "format",
        "options": {"pattern": "[aeiou]", "match": "search"},
    }
    recipe.content["train"] = {"steps": 2, "prompts_per_step": 6}
    recipe.content["rollout"] = {"max_refills": 5, "max_staleness": 1}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    first, second = lines_of(recipe)
    assert first["rollout/buffered"] > 0
    assert first["samples/trained"] == 12
    assert second["rollout/staleness_max"] == 1, "trained on what had waited"


def test_a_step_without_any_spread_trains_on_nothing(recipe, chatlearn):
    """All rewards are 1: every group is left out, after the refills that are allowed."""
    set_up(recipe, "dapo", group_size=2)
    recipe.content["roles"]["reward"] = {"kind": "reward", "backend": "format", "options": {"pattern": "(?s).*"}}
    recipe.content["train"] = {"steps": 1, "prompts_per_step": 2}
    recipe.content["rollout"] = {"max_refills": 1}
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 0, finished.output
    [line] = lines_of(recipe)
    assert line["samples/trained"] == 0
    assert line["samples/excluded/zero_spread_group"] == 8
    assert line["rollout/discarded_tokens"] > 0
    said = "algorithm 'dapo' would draw 2 more prompts; the step trains on those of its 4 groups that are not excluded"
    assert said in finished.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm": {"name": "ppo"}}, "critic"),
        ({"roles": {"critic": CRITIC["critic"]}}, "roles.critic is defined, but the flow of algorithm 'grpo' never"),
        (
            {"algorithm": {"name": "ppo"}, "roles": {"critic": {"kind": "trainer", "backend": "fsdp"}}},
            "roles.critic.head is 'lm', but",
        ),
        ({"algorithm": {"name": "rloo", "options": {"group_size": 1}}}, "greater than or equal to 2"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, chatlearn, change, says):
    recipe.content["algorithm"] = {"name": "grpo", "options": {"group_size": 2}}
    del recipe.content["roles"]["reference"]
    recipe.content["algorithm"] = change.get("algorithm", recipe.content["algorithm"])
    recipe.content["roles"] |= change.get("roles", {})
    recipe.write()
    finished = chatlearn("run", recipe.file)
    assert finished.code == 2
    assert says in finished.output
