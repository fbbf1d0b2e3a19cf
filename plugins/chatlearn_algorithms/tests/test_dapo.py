from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from chatlearn_algorithms.dapo import DAPO
from chatlearn_algorithms.grpo_options import DAPOOptions
from chatlearn_core.types import RewardResult, scored_batch


@pytest.fixture
def make_dapo(make_context):
    def build(prompts_per_step: int = 3, **options: object) -> DAPO:
        return DAPO(DAPOOptions(**options), replace(make_context(), prompts_per_step=prompts_per_step))

    return build


def test_groups_without_spread_are_wanted_again(make_dapo, make_group):
    groups = [*make_group("a", [1.0, 0.0]), *make_group("b", [1.0, 1.0]), *make_group("c", [0.0, 0.0])]
    algorithm = make_dapo()
    assert algorithm.wanted([]) == 3
    assert algorithm.wanted(groups) == 2
    assert algorithm.wanted([*groups, *make_group("d", [0.5, 0.0]), *make_group("e", [0.5, 0.0])]) == 0
    assert make_dapo(1).wanted(groups) == 0, "more than enough"
    assert make_dapo(dynamic_sampling=False).wanted([]) == 0


def test_failed_samples_give_no_spread(make_dapo, make_group):
    """One verdict and one failure are no spread; rewards of single tokens count."""
    failed = make_group("a", [1.0, None])
    of_tokens = make_group("b", [1.0, 1.0], [2, 2])
    assert make_dapo(2).wanted([*failed, *of_tokens]) == 2
    of_tokens[0].reward = RewardResult(1.0, token_values=np.array([0.5, 0.0], dtype=np.float32))
    assert make_dapo(2).wanted([*failed, *of_tokens]) == 1


@pytest.mark.parametrize(("oversampling", "drawn"), [(1.0, 3), (1.5, 5), (2.0, 6)])
def test_more_may_be_drawn_than_are_missing(make_dapo, oversampling, drawn):
    assert make_dapo(oversampling=oversampling).wanted([]) == drawn


def test_length_alone_is_no_spread(make_dapo, make_group):
    """Verdicts decide what a group can teach; the penalty then counts in the advantages of groups that stay."""
    algorithm = make_dapo(overlong_buffer=8, overlong_length=10)
    samples = [*make_group("a", [1.0, 1.0], [2, 9]), *make_group("b", [1.0, 0.0], [9, 2])]
    derived = algorithm.advantages(scored_batch(samples), 1)
    assert derived.exclusions == dict.fromkeys(("a@0#0", "a@0#1"), "zero_spread_group")
    assert derived.metrics["reward"].value == 0.75, "what the reward gave"
    assert derived.metrics["reward_shaping"].value == pytest.approx(-2 * (7 / 8) / 4)
    # 1 − 7/8 against 0: the mean is 1/16, as is the deviation.
    assert derived.sequence_data["advantage"][2:].tolist() == pytest.approx([1, -1], rel=1e-3)
    assert algorithm.wanted(samples) == 2


def test_the_loss_clips_higher(make_dapo):
    loss = make_dapo().loss()
    assert (loss.objective.low, loss.objective.high, loss.aggregation.name) == (0.2, 0.28, "token_mean")
