"""Rewards are asked about the ground truths of the data before a run starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.executor.ground_truths import ground_truth_check
from chatlearn_core.plugins.records import RewardSpec
from chatlearn_core.runtime.plan import BackendPlan
from chatlearn_core.types import Prompt


def no_cats(options: Any, ground_truth: Any) -> str | None:
    return f"has the ground truth {ground_truth!r}; {options}" if ground_truth == "cat" else None


def prompt(ground_truth: Any, data_source: str = "pets") -> Prompt:
    return Prompt(id="p1", token_ids=np.zeros(1, np.int32), text="", data_source=data_source, ground_truth=ground_truth)


def reward(check: str | None, data_sources: frozenset[str] | None = None) -> BackendPlan:
    record = RewardSpec(name="pets", factory="x:y", options="x:z", check_ground_truth=check)
    options: Any = "cats cannot be graded"
    return BackendPlan("roles.judge", record, options, 1.0, data_sources)


def check(*backends: BackendPlan) -> Any:
    graph: Any = SimpleNamespace(roles={"judge": "reward"})
    plan: Any = SimpleNamespace(roles={"judge": SimpleNamespace(backends=backends)})
    return ground_truth_check(graph, plan)


def test_what_a_reward_cannot_grade_is_said_with_its_name_and_role():
    problem = check(reward(None), reward(f"{__name__}:no_cats"))
    assert problem(prompt("dog")) is None
    assert problem(prompt("cat")) == (
        "reward 'pets' of role 'judge': prompt 'p1' has the ground truth 'cat'; cats cannot be graded"
    )


@pytest.mark.parametrize(("data_source", "refused"), [("pets", True), ("wild", False)])
def test_only_rewards_for_the_data_source_are_asked(data_source, refused):
    problem = check(reward(f"{__name__}:no_cats", frozenset({"pets"})))
    assert (problem(prompt("cat", data_source)) is not None) == refused
