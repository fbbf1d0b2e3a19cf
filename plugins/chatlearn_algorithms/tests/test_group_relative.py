"""Dynamic sampling and overlong shaping, in every algorithm that compares the completions of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_algorithms.dapo import DAPO
from chatlearn_algorithms.group_relative import GroupBased
from chatlearn_algorithms.grpo_options import DAPOOptions
from chatlearn_algorithms.plugin import _POLICY_GRADIENTS
from chatlearn_algorithms.policy_gradient_options import GroupOptions
from chatlearn_core.plugins.import_string import resolve_import_string
from chatlearn_core.types import RewardResult, Sample, scored_batch

REWARDS = {"right": 1.0, "short": 1.0}
OPTIONS: dict[str, dict[str, Any]] = {"gdpo": {"rewards": REWARDS}}
NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "gdpo", "rloo", "reinforce_pp_baseline", "maxrl")
SHAPED = tuple(name for name in NAMES if name not in ("gdpo", "maxrl"))


@pytest.fixture
def build(make_context: Any) -> Callable[..., GroupBased[Any]]:
    def build(name: str, prompts_per_step: int = 4, **options: Any) -> GroupBased[Any]:
        factory, model, _ = _POLICY_GRADIENTS[name]
        chosen = resolve_import_string(f"chatlearn_algorithms.{model}")(**OPTIONS.get(name, {}), **options)
        algorithm = resolve_import_string(f"chatlearn_algorithms.{factory}")
        return algorithm(chosen, replace(make_context(), prompts_per_step=prompts_per_step))

    return build


def scored(samples: list[Sample], *verdicts: tuple[float, float]) -> list[Sample]:
    for sample, (right, short) in zip(samples, verdicts, strict=True):
        sample.reward = RewardResult(right + short, {"right": right, "short": short})
    return samples


def test_these_are_all_with_groups() -> None:
    models = {
        name: resolve_import_string(f"chatlearn_algorithms.{model}")
        for name, (_, model, _) in _POLICY_GRADIENTS.items()
    }
    assert {name for name, model in models.items() if issubclass(model, GroupOptions)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_groups_that_count_are_those_that_are_trained_on(build: Any, make_group: Any, name: str) -> None:
    """Of five groups one is split, one has equal sums of other components, two are equal and one is too small."""
    groups = [
        scored(make_group("split", [0.0] * 2), (1.0, 0.0), (0.0, 0.0)),
        scored(make_group("exchanged", [0.0] * 2), (1.0, 0.0), (0.0, 1.0)),
        scored(make_group("solved", [0.0] * 2), (1.0, 1.0), (1.0, 1.0)),
        scored(make_group("failed", [0.0] * 2), (0.0, 0.0), (0.0, 0.0)),
        scored(make_group("single", [0.0]), (1.0, 0.0)),
    ]
    samples = [sample for group in groups for sample in group]
    algorithm = build(name, 10, drop_zero_spread_groups=True, dynamic_sampling=True, oversampling=1.5)
    derived = algorithm.advantages(scored_batch(samples), 1)
    kept = {sample.group_id for sample in samples if sample.id not in derived.exclusions}
    assert kept == ({"split@0", "exchanged@0"} if name == "gdpo" else {"split@0"})
    assert derived.exclusions["single@0#0"] == "group_too_small"
    assert derived.exclusions["solved@0#1"] == "zero_spread_group"
    assert algorithm.wanted(samples) == -(-(10 - len(kept)) * 3 // 2)
    assert build(name, 10, dynamic_sampling=False).wanted(samples) == 0
    assert build(name).options.dynamic_sampling == (name == "dapo"), "only DAPO samples dynamically by default"


def test_with_supervised_steps_the_steps_count(build: Any, make_group: Any) -> None:
    """Steps that differ are a spread where sums of rewards are none, in both counts."""
    samples = [*make_group("a", [0.0] * 2, [3, 3]), *make_group("b", [0.0] * 2, [3, 3])]
    for sample, values in zip(samples, [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.0, 1.0)], strict=True):
        of_tokens = np.array([values[0], 0.0, values[1]], np.float32)
        sample.reward = RewardResult(0.0, token_values=of_tokens, step_ends=np.array([0, 2]))
    for supervision, wanted in (("process", 1), ("outcome", 2)):
        settings = {"drop_zero_spread_groups": True, "dynamic_sampling": True, "supervision": supervision}
        algorithm = build("grpo", 2, **settings)
        assert algorithm.wanted(samples) == wanted
        excluded = {one.split("@")[0] for one in algorithm.advantages(scored_batch(samples), 1).exclusions}
        assert len(excluded) == wanted


@given(lengths=st.lists(st.integers(1, 20), min_size=2, max_size=4), buffer=st.integers(1, 16))
def test_overlong_completions_lose_reward(make_context, make_group, lengths, buffer):
    """Eq. 13 with L = 16 (the longest completion) and B the buffer, times the penalty."""
    algorithm = DAPO(DAPOOptions(overlong_buffer=buffer, overlong_penalty=0.5), make_context(max_completion_tokens=16))
    batch = scored_batch(make_group("a", [1.0] * len(lengths), lengths))
    expected = []
    for length in lengths:
        if length <= 16 - buffer:
            expected.append(0.0)
        elif length <= 16:
            expected.append(0.5 * ((16 - buffer) - length) / buffer)
        else:
            expected.append(-0.5)
    assert algorithm.bonus(batch).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", SHAPED)
def test_a_long_completion_has_a_lower_advantage(build: Any, make_group: Any, name: str) -> None:
    """Of two right ones, one is at the end of the buffer: as if its reward were 1 - 0.5, also in the group's mean."""
    samples = [*make_group("a", [1.0, 1.0, 0.0], [2, 10, 2]), *make_group("b", [1.0, 0.0], [2, 2])]
    algorithm = build(name, overlong_buffer=8, overlong_length=10, overlong_penalty=0.5)
    shaped = algorithm.advantages(scored_batch(samples), 1)
    samples[1].reward = RewardResult(0.5)
    plain = build(name).advantages(scored_batch(samples), 1)
    torch.testing.assert_close(shaped.token_data["advantages"], plain.token_data["advantages"])
    assert shaped.metrics["reward_shaping"].value == pytest.approx(-0.5 / 5)
    rows = shaped.token_data["advantages"].split(scored_batch(samples).lengths)
    assert rows[0][-1] > rows[1][-1] > rows[2][-1]
