from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from chatlearn_algorithms import plugin
from chatlearn_algorithms.example_kinds import Preferences
from chatlearn_core.executor.aggregations import select_aggregation
from chatlearn_core.plugins.loader import load_plugins
from chatlearn_core.plugins.sources import PluginSource
from chatlearn_core.protocols.algorithm import AlgorithmContext
from chatlearn_core.types import (
    Answer,
    Completion,
    ExampleDraw,
    LogprobBasis,
    Preference,
    Prompt,
    RewardResult,
    Sample,
    SamplingParams,
    TrainBatch,
    VersionSpan,
    pack_samples,
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


@pytest.fixture(scope="session")
def make_preferences() -> Callable[..., TrainBatch]:
    """Builds the batch of ranked completions: one list of (rank, completion length) a prompt, float64 logprobs."""

    def build(*prompts: Sequence[tuple[float, int]], num_prompt: int = 2, seed: int = 0) -> TrainBatch:
        generator = torch.Generator().manual_seed(seed)
        samples = []
        for number, completions in enumerate(prompts):
            prompt = Prompt(f"p{number}", np.arange(num_prompt), "text")
            answers = tuple(Answer(np.arange(length)) for _, length in completions)
            example = Preference(prompt, answers, ranks=tuple(rank for rank, _ in completions))
            samples += Preferences().samples(ExampleDraw(example, 0, f"p{number}"))
        batch = pack_samples(samples)
        for name in ("logprobs", "reference_logprobs"):
            drawn = torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64)
            batch.token_data[name] = torch.where(batch.loss_mask, -3 * drawn - 0.01, 0.0)
        return batch

    return build
