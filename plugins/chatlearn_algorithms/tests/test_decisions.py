from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from chatlearn_algorithms.decision_options import EarlyStopOptions, LinearOptions, TruncatedOptions
from chatlearn_algorithms.early_stop import EarlyStop
from chatlearn_algorithms.grpo import GRPO
from chatlearn_algorithms.grpo_options import GRPOOptions
from chatlearn_algorithms.linear import Linear
from chatlearn_algorithms.truncated import Truncated
from chatlearn_core.exceptions import CheckpointError


def test_a_line_and_what_is_outside_it():
    line = Linear(LinearOptions(start=1.0, end=0.0, first_step=3, last_step=7))
    assert [line.value(step) for step in (1, 3, 4, 5, 7, 9)] == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    with pytest.raises(ValidationError, match="last_step=3 must be after first_step=3"):
        LinearOptions(start=1.0, end=0.0, first_step=3, last_step=3)


def test_options_follow_their_schedules(make_context):
    context = replace(make_context(), schedules={"clip_high": Linear(LinearOptions(start=0.2, end=0.4, last_step=3))})
    algorithm = GRPO(GRPOOptions(), context)
    assert [algorithm.updates(step)[0].loss.objective.high for step in (1, 2, 3, 4)] == pytest.approx(
        [0.2, 0.3, 0.4, 0.4]
    )
    assert set(context.schedules) <= algorithm.scheduled


def test_cut_completions_are_left_out(make_group):
    samples = make_group("a", [1.0, 0.0, 1.0])
    samples[1].turns = (replace(samples[1].turns[0], finish_reason="length"),)
    assert Truncated(TruncatedOptions()).excluded(samples) == {samples[1].id: "truncated"}


def test_a_run_ends_when_nothing_improves():
    policy = EarlyStop(EarlyStopOptions(metric="m", patience=2, min_improvement=0.1))
    decisions = [
        policy.after_step(step, {"m": value} if value is not None else {})
        for step, value in enumerate([0.5, None, 0.55, 0.7, 0.75, None, 0.79], start=1)
    ]
    assert [decision is not None for decision in decisions] == [False] * 6 + [True]
    assert decisions[-1].stop == "m has not improved on 0.7 in its last 2 measurements"


def test_a_goal_ends_it_at_once_and_smaller_may_be_better():
    policy = EarlyStop(EarlyStopOptions(metric="loss", mode="min", goal=0.1, patience=1))
    assert policy.after_step(1, {"loss": 0.5}) is None
    assert policy.after_step(2, {"loss": 0.4}) is None
    assert policy.after_step(3, {"loss": 0.1}).stop == "loss is 0.1 and its goal 0.1"


def test_the_count_survives_a_checkpoint():
    options = EarlyStopOptions(metric="m", patience=2)
    first, second = EarlyStop(options), EarlyStop(options)
    first.after_step(1, {"m": 1.0})
    first.after_step(2, {"m": 0.5})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.after_step(3, {"m": 0.5}).stop is not None


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_value_that_is_not_finite_is_no_improvement(odd: float, mode: str):
    """Not even as the first, or best: nothing would improve on it, and JSON could not hold it."""
    policy = EarlyStop(EarlyStopOptions(metric="m", mode=mode, patience=2, goal=0.0 if mode == "min" else 1.0))
    assert policy.after_step(1, {"m": odd}) is None
    json.dumps(policy.state_dict(), allow_nan=False)
    assert policy.after_step(2, {"m": 0.5}) is None
    assert policy.after_step(3, {"m": odd}) is None
    assert policy.after_step(4, {"m": odd}).stop == "m has not improved on 0.5 in its last 2 measurements"


def test_a_metric_that_is_never_finite_ends_a_run():
    policy = EarlyStop(EarlyStopOptions(metric="m", patience=2))
    assert policy.after_step(1, {"m": math.nan}) is None
    assert policy.after_step(2, {"m": math.nan}).stop == "m has not improved on any value in its last 2 measurements"


@pytest.mark.parametrize(
    "state", [{}, {"best": 1.0}, {"best": "x", "since_best": 0}, {"best": 1.0, "since_best": None}]
)
def test_a_damaged_state_is_refused(state: dict):
    with pytest.raises(CheckpointError, match="state of early_stop is damaged"):
        EarlyStop(EarlyStopOptions()).load_state_dict(state)
