from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chatlearn_core.protocols import AlgorithmContext
from chatlearn_core.types import RAW_BASIS, Prompt, RewardResult, Sample, TrainBatch, pack_samples

from acme_plugin.algorithm import Acme
from acme_plugin.options import AcmeOptions

NUM_PROMPT = 2


@pytest.fixture
def algorithm() -> Acme:
    roles = {"trainer": "trainer", "generator": "generator", "reward": "reward"}
    return Acme(AcmeOptions(group_size=3), AlgorithmContext(RAW_BASIS, 8, roles))


def make_samples(rewards: Sequence[float], num_completion_tokens: int = 3) -> list[Sample]:
    prompt = Prompt("p", np.zeros(NUM_PROMPT, dtype=np.int64), "")
    length = NUM_PROMPT + num_completion_tokens
    mask = np.arange(length) >= NUM_PROMPT
    return [
        Sample(f"p@1#{i}", "p@1", prompt, np.zeros(length, dtype=np.int64), mask, reward=RewardResult(value))
        for i, value in enumerate(rewards)
    ]


def test_advantage_is_the_reward_less_the_mean_of_the_others(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0, 0.5])
    metrics = algorithm.prepare_samples(samples)
    for sample, expected in zip(samples, [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5], strict=True):
        assert sample.token_data["advantages"].tolist() == pytest.approx([0.0] * NUM_PROMPT + [expected] * 3)
    assert metrics["reward"].value == pytest.approx(0.5)


def test_excluded_samples_are_no_part_of_a_group_and_one_alone_is_excluded(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0, 0.5])
    samples[0].exclusion = samples[1].exclusion = "reward_error"
    algorithm.prepare_samples(samples)
    assert [sample.exclusion for sample in samples] == ["reward_error", "reward_error", "group_too_small"]


def test_an_empty_completion_is_excluded(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0], num_completion_tokens=0)
    algorithm.prepare_samples(samples)
    assert {sample.exclusion for sample in samples} == {"empty_completion"}


def test_loss_and_gradient_are_the_policy_gradient(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0])
    algorithm.prepare_samples(samples)
    loss = algorithm.losses()["trainer"]
    batch = loss.prepare(pack_samples(samples))
    logprobs = torch.linspace(-2.0, -1.0, batch.num_tokens, requires_grad=True)
    loss({"logprobs": logprobs}, batch).total.backward()
    # By hand: advantages are +1 and -1, and there are 6 learned tokens.
    expected = [0.0, 0.0, -1 / 6, -1 / 6, -1 / 6, 0.0, 0.0, 1 / 6, 1 / 6, 1 / 6]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected)


def test_parts_of_a_mini_batch_add_up(algorithm: Acme) -> None:
    samples = make_samples([1.0, 0.0, 0.25])
    algorithm.prepare_samples(samples)
    loss = algorithm.losses()["trainer"]
    batch = loss.prepare(pack_samples(samples))

    def total(part: TrainBatch) -> float:
        return float(loss({"logprobs": -part.token_data["noise"]}, part).total)

    batch.token_data["noise"] = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    parts = [batch.select([0]), batch.select([1, 2]), batch.select([])]
    assert sum(total(part) for part in parts) == pytest.approx(total(batch), abs=1e-6)
    assert abs(total(batch)) > 1e-3
