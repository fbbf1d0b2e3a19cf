from __future__ import annotations

import numpy as np
from chatlearn_core.protocols import SamplerContext
from chatlearn_core.types import ExampleDraw, RewardResult, Sample
from chatlearn_testing.suites import SamplerConformance
from chatlearn_testing.suites.sampler import make_dataset

from acme_plugin.options import AcmeOptions
from acme_plugin.sampler import AcmeSampler


class TestConformance(SamplerConformance):
    backend = "acme"


def scored(draw: ExampleDraw, rewards: list[float]) -> list[Sample]:
    ids, mask = np.array([1, 2, 3]), np.array([False, False, True])
    return [
        Sample(draw.sample_id(i), draw.group_id, draw.example.prompt, ids, mask, reward=RewardResult(reward))
        for i, reward in enumerate(rewards)
    ]


def test_a_solved_prompt_rests_for_one_pass() -> None:
    context = SamplerContext([make_dataset("math", 4)], seed=0, shuffle=True)
    sampler = AcmeSampler(AcmeOptions(), context)
    solved, half, *_ = first = sampler.next_batch(4)
    sampler.observe([*scored(solved, [1.0, 1.0]), *scored(half, [1.0, 0.0])])
    every = {draw.example.id for draw in first}
    passes = [sampler.next_batch(3), sampler.next_batch(4)]
    assert [{draw.example.id for draw in batch} for batch in passes] == [every - {solved.example.id}, every]


def test_if_all_are_solved_none_rests() -> None:
    context = SamplerContext([make_dataset("math", 3)], seed=0, shuffle=True)
    sampler = AcmeSampler(AcmeOptions(), context)
    for draw in (first := sampler.next_batch(3)):
        sampler.observe(scored(draw, [1.0]))
    assert {draw.example.id for draw in sampler.next_batch(3)} == {draw.example.id for draw in first}
