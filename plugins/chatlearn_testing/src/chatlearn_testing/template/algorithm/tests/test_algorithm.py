from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import RAW_BASIS, Derived, Prompt, RewardResult, Sample, TrainBatch, scored_batch
from chatlearn_testing.suites import AlgorithmConformance

from acme_plugin.algorithm import Acme
from acme_plugin.options import AcmeOptions

NUM_PROMPT = 2


class TestConformance(AlgorithmConformance):
    backend = "acme"


@pytest.fixture
def algorithm() -> Acme:
    roles = {"trainer": "trainer", "generator": "generator", "reward": "reward"}
    context = AlgorithmContext(RAW_BASIS, 8, roles)
    return Acme(AcmeOptions(group_size=3), context)


def make_samples(rewards: Sequence[float], num_completion_tokens: int = 3) -> list[Sample]:
    prompt = Prompt("p", np.zeros(NUM_PROMPT, dtype=np.int64), "")
    length = NUM_PROMPT + num_completion_tokens
    mask = np.arange(length) >= NUM_PROMPT
    return [
        Sample(f"p@0#{i}", "p@0", prompt, np.zeros(length, dtype=np.int64), mask, reward=RewardResult(value))
        for i, value in enumerate(rewards)
    ]


def derived(algorithm: Acme, samples: Sequence[Sample]) -> tuple[TrainBatch, Derived]:
    """Return the samples as a batch with the algorithm's advantages, computed as the executor does."""
    batch = scored_batch(samples)
    result = algorithm.advantages(batch, step=1)
    batch.token_data |= result.token_data
    return batch, result


def test_advantage_is_the_reward_minus_the_mean_of_the_others(algorithm: Acme) -> None:
    batch, result = derived(algorithm, make_samples([1.0, 0.0, 0.5]))
    expected = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]
    for values, advantage in zip(batch.token_data["advantages"].split(batch.lengths), expected, strict=True):
        assert values.tolist() == pytest.approx([0.0] * NUM_PROMPT + [advantage] * 3)
    assert result.metrics["reward"].value == pytest.approx(0.5)
    assert not result.exclusions


def test_a_completion_alone_in_its_group_is_excluded(algorithm: Acme) -> None:
    _, result = derived(algorithm, make_samples([0.5]))
    assert result.exclusions == {"p@0#0": "group_too_small"}


def test_loss_and_gradient_are_the_policy_gradient(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0])
    [update] = algorithm.updates(step=1)
    loss = update.loss
    batch = loss.prepare(derived(algorithm, samples)[0])
    logprobs = torch.linspace(-2.0, -1.0, batch.num_tokens, requires_grad=True)
    loss({"logprobs": logprobs}, batch).total.backward()
    # By hand: advantages are +1 and -1, and there are 6 learned tokens.
    expected = [0.0, 0.0, -1 / 6, -1 / 6, -1 / 6, 0.0, 0.0, 1 / 6, 1 / 6, 1 / 6]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected)
