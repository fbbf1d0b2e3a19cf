"""Random combinations of options: every policy gradient trains with them, or refuses them by naming an option."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from pydantic import BaseModel

from chatlearn_algorithms.plugin import _POLICY_GRADIENTS
from chatlearn_core.exceptions import ConfigError
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.types import SamplingParams
from chatlearn_testing.suites.algorithm_step import MAX_TOKENS, TEMPERATURE, AlgorithmSetup, AlgorithmStep
from chatlearn_testing.suites.conformance_suite import installed_plugins

COMPONENTS = ("right", "short")
VALUES: dict[str, tuple[Any, ...]] = {
    "group_size": (2, 3),
    "aggregation": (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "prompt_mean",
    ),
    "aggregation_options": ({},),
    "constant_length": (None, 5),
    "kl_coef": (0.0, 0.1, 2.0),
    "kl_placement": ("loss", "reward"),
    "kl_estimator": ("k1", "k2", "k3", "k1_straight_through", "k3_straight_through", "full"),
    "kl_top_k": (4, 80),
    "kl_weight": ("none", "ratio", "generator_ratio", "score"),
    "kl_clamp": ("k3", "all", "none"),
    "kl_target": (None, 0.05),
    "kl_horizon": (8,),
    "entropy_coef": (0.0, 0.01, -0.01),
    "log_entropy": (True, False),
    "recompute_old_logprobs": (True, False),
    "truncated_logprobs": (True, False),
    "importance_correction": ("none", "truncate", "mask", "mask_sequences"),
    "importance_level": ("token", "sequence", "sequence_geometric"),
    "importance_threshold": (0.9, 2.0, math.inf),
    "importance_min": (None, 0.5, 1.5),
    "clip_low": (0.0, 0.2),
    "clip_high": (0.0, 0.3),
    "dual_clip": (None, 1.5),
    "drop_zero_spread_groups": (True, False),
    "dynamic_sampling": (True, False),
    "oversampling": (1.0, 2.0),
    "overlong_buffer": (None, 3),
    "overlong_penalty": (1.0,),
    "overlong_length": (None, 2, 6),
    "advantage_std": ("population", "sample", "none"),
    "epsilon": (1e-4,),
    "supervision": ("outcome", "process"),
    "rewards": ({"right": 1.0}, {"right": 1.0, "short": -0.5}),
    "whiten_over": ("sequence", "token"),
    "gamma": (0.0, 0.9, 1.0),
    "gae_lambda": (0.0, 1.0),
    "whiten_advantages": (True, False),
    "value_clip": (None, 0.1),
    "value_aggregation": ("seq_mean_token_mean", "prompt_mean"),
    "value_aggregation_options": ({},),
    "critic_warmup_steps": (0, 1),
    "critic_epochs": (None, 2),
    "critic_mini_batches": (None, 1),
}
"""Option -> values that are allowed alone."""
NEEDED = {"gdpo": {"rewards": {"right": 1.0, "short": 0.5}}}
"""Options without a default."""
TRUNCATED = {"top_k": 8, "max_kept_ids": 8}
DRAWS = 4
"""Per algorithm and seed."""


def model_of(name: str) -> type[BaseModel]:
    model: type[BaseModel] = resolve_import_string(f"chatlearn_algorithms.{_POLICY_GRADIENTS[name][1]}")
    return model


def trained(name: str, options: dict[str, Any], **roles: str) -> None:
    """Make one step. Raises ValueError or ConfigError: the options are refused."""
    chosen: Any = model_of(name)(**options)
    sampling = SamplingParams(
        MAX_TOKENS, temperature=TEMPERATURE, **(TRUNCATED if options.get("truncated_logprobs") else {})
    )
    setup = AlgorithmSetup(
        installed_plugins(),
        lambda context: resolve_import_string(f"chatlearn_algorithms.{_POLICY_GRADIENTS[name][0]}")(chosen, context),
        dict(chosen.required_roles) | roles,
        sampling,
        components=COMPONENTS,
        steps=options.get("supervision") == "process",
    )
    step = AlgorithmStep(setup)
    metrics = step.train()
    assert all(math.isfinite(metric.value) for metric in metrics.values()), metrics
    for role, trainer in step.roles.trainers.items():
        assert (trainer.updates > 0) == (role in {update.role for update in step.updates(1)}), role
        assert all(values.isfinite().all() for values in trainer.tables.values()), role


def test_every_option_is_drawn() -> None:
    fields = {field for name in _POLICY_GRADIENTS for field in model_of(name).model_fields}
    assert fields - {"roles"} == VALUES.keys()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 20))])
@pytest.mark.parametrize("name", _POLICY_GRADIENTS)
def test_options_work_together_or_are_refused_by_name(name: str, seed: int) -> None:
    drawn = random.Random(f"{name} {seed}")
    fields = sorted(model_of(name).model_fields.keys() & VALUES.keys())
    trained(name, dict(NEEDED.get(name, {})))
    for _ in range(DRAWS):
        options = dict(NEEDED.get(name, {}))
        for option in drawn.sample(fields, drawn.randint(1, 8)):
            options[option] = drawn.choice(VALUES[option])
        roles = {"reference": "trainer"} if drawn.random() < 0.8 else {}
        try:
            trained(name, options, **roles)
        except (ValueError, ConfigError) as refusal:
            said = str(refusal)
            assert any(option in said for option in options), f"{name} {options}: {said}"
        except Exception as error:
            raise AssertionError(f"{name} with {options}, roles {roles}") from error
