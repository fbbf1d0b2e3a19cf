import math

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_trainer_kit.options import OptimizerOptions
from chatlearn_trainer_kit.schedule import check_schedule, learning_rate


def test_constant_with_warmup() -> None:
    options = OptimizerOptions(learning_rate=2.0, warmup_steps=4)
    assert [learning_rate(options, u, None) for u in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_to_the_minimum_and_stays() -> None:
    options = OptimizerOptions(learning_rate=1.0, schedule="linear", warmup_steps=2, min_lr_ratio=0.1)
    assert learning_rate(options, 2, 10) == 1.0
    assert learning_rate(options, 6, 10) == pytest.approx(0.55)
    assert learning_rate(options, 10, 10) == pytest.approx(0.1)
    assert learning_rate(options, 99, 10) == pytest.approx(0.1)


def test_cosine_is_the_closed_form() -> None:
    options = OptimizerOptions(learning_rate=3.0, schedule="cosine", min_lr_ratio=0.2)
    for update in range(9):
        expected = 3.0 * (0.2 + 0.8 * (1 + math.cos(math.pi * update / 8)) / 2)
        assert learning_rate(options, update, 8) == pytest.approx(expected)


def test_schedule_that_needs_an_end_is_refused_without_one() -> None:
    with pytest.raises(ConfigError, match=r"roles\.policy\.options\.schedule"):
        check_schedule(OptimizerOptions(schedule="cosine"), None, "policy")


def test_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps is 10"):
        check_schedule(OptimizerOptions(schedule="linear", warmup_steps=10), 10, "policy")
