from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from chatlearn_algorithms import plugin
from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_core.protocols.algorithm import AlgorithmContext
from chatlearn_core.types import (
    Completion,
    LogprobBasis,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)

MakeGroup = Callable[..., list[Sample]]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


REGISTRY = load_plugins([PluginSource("algorithms", "chatlearn-algorithms", "0", load=lambda: plugin)])


@pytest.fixture(scope="session")
def make_context() -> Callable[..., AlgorithmContext]:
    def build(
        basis: LogprobBasis | None = None,
        max_completion_tokens: int = 16,
        generator_basis: LogprobBasis | None = None,
        **roles: str,
    ) -> AlgorithmContext:
        configured = {"trainer": "trainer", "generator": "generator", "reward": "reward", **roles}
        return AlgorithmContext(
            basis or LogprobBasis(),
            max_completion_tokens,
            configured,
            generator_basis,
            "acme (role generator)",
            aggregation=partial(select_aggregation, REGISTRY),
        )

    return build


@pytest.fixture(scope="session")
def make_group() -> MakeGroup:
    """Builds the scored samples of one prompt; a reward of None means that scoring failed and excluded the sample."""

    def build(
        name: str, rewards: Sequence[float | None], lengths: Sequence[int] | None = None, num_prompt: int = 3
    ) -> list[Sample]:
        generator = np.random.default_rng(len(name) + len(rewards))
        prompt = Prompt(name, generator.integers(0, 9, num_prompt), "text")
        samples = []
        for k, reward in enumerate(rewards):
            length = lengths[k] if lengths else 2 + k
            completion = Completion(
                request_id=f"{name}#{k}",
                token_ids=generator.integers(0, 9, length),
                logprobs=-generator.random(length).astype(np.float32) - 0.1,
                basis=LogprobBasis(),
                finish_reason="stop",
                sampling=SamplingParams(max_tokens=16),
                version_spans=(VersionSpan(0, length, 0),),
            )
            sample = sample_from_completion(f"{name}@0#{k}", f"{name}@0", prompt, completion)
            if reward is None:
                sample.reward = RewardResult(None, error="timeout")
                sample.exclusion = "reward_error"
            else:
                sample.reward = RewardResult(reward)
            samples.append(sample)
        return samples

    return build
