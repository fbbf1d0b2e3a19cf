from __future__ import annotations

import pytest

from chatlearn_core.protocols import Reward
from chatlearn_rewards.math_reward import MathReward
from chatlearn_rewards.options import MathOptions


async def test_values_accuracy_and_missing_truths(use, make_sample):
    reward = use(MathReward, MathOptions(correct=1.0, incorrect=-1.0, num_workers=1))
    assert isinstance(reward, Reward)
    assert reward.health() is None
    right, wrong, missing, number = await reward.score(
        [
            make_sample(r"\boxed{\frac12}", "0.5"),
            make_sample(r"\boxed{2}", "0.5"),
            make_sample(r"\boxed{2}", None, index=3),
            make_sample("it is 2", 2.0),
        ]
    )
    assert (right.value, right.components) == (1.0, {"accuracy": 1.0})
    assert (wrong.value, wrong.components) == (-1.0, {"accuracy": 0.0})
    assert missing.value is None
    assert "prompt 'p3' has no ground truth" in missing.error
    assert number.value == 1.0
    assert await reward.score([]) == []


@pytest.mark.parametrize("power", ["9^{9^{9^{9}}}", "9^{9^{9^{9^{9}}}} - 1"])
async def test_an_answer_that_never_finishes_costs_only_itself(use, make_sample, power):
    """Whether sympy hangs, runs out of memory or copes: the others are judged."""
    reward = use(MathReward, MathOptions(num_workers=1, timeout_s=1.0))
    results = await reward.score(
        [make_sample(r"\boxed{4}", "4"), make_sample(rf"\boxed{{{power}}}", "4"), make_sample(r"\boxed{5}", "5")]
    )
    assert [results[0].value, results[2].value] == [1.0, 1.0]
    assert (results[1].value, results[1].components["accuracy"]) == (0.0, 0.0)
