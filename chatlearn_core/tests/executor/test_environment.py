"""Experience: what is asked for depends on (seed, prompt, step, index) alone, and every sample is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.executor.environment import (
    Environment,
    both_logprobs,
    generator_mismatch,
    make_slots,
    sample_metrics,
)
from chatlearn_core.executor.seeds import keyed_seed
from chatlearn_core.metrics import Timers
from chatlearn_core.types import (
    Completion,
    Demonstration,
    Metric,
    Metrics,
    Prompt,
    Sample,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)

SAMPLING = SamplingParams(8, temperature=0.5, top_p=1.0)


def make_prompt(name: str) -> Prompt:
    return Prompt(name, np.array([1, 2, 3]), "?")


def finished(name: str, length: int, *, reason: Any = "stop", exclusion: str | None = None) -> Sample:
    completion = Completion(
        name, np.arange(length), np.full(length, -1.0, np.float32), SAMPLING.basis, reason, SAMPLING, ()
    )
    sample = sample_from_completion(name, name, make_prompt(name), completion)
    sample.exclusion = exclusion
    return sample


def test_one_slot_a_sample_group_by_group() -> None:
    slots = make_slots([make_prompt("a"), make_prompt("b")], 3, 2, SAMPLING, seed=7)
    assert [slot.sample_id for slot in slots] == ["a@3#0", "a@3#1", "b@3#0", "b@3#1"]
    assert [slot.group_id for slot in slots] == ["a@3", "a@3", "b@3", "b@3"]
    for slot in slots:
        assert slot.request is not None
        assert (slot.request.id, slot.request.group_id) == (slot.sample_id, slot.group_id)
        assert slot.request.sampling == SamplingParams(8, 0.5, seed=keyed_seed(7, "sample", slot.sample_id))


def seeds(prompts: list[str], step: int | str, seed: int) -> dict[str, int]:
    slots = make_slots([make_prompt(name) for name in prompts], step, 2, SAMPLING, seed)
    return {slot.sample_id: slot.request.sampling.seed for slot in slots if slot.request}


def test_seeds_are_keyed_by_seed_prompt_step_and_index_and_nothing_else() -> None:
    alone, together = seeds(["b"], 1, 0), seeds(["a", "b", "c"], 1, 0)
    assert alone.items() <= together.items(), "what else is in the batch does not matter"
    everything = [*together.values(), *seeds(["a", "b", "c"], 2, 0).values(), *seeds(["a", "b", "c"], 1, 1).values()]
    assert len(set(everything)) == len(everything), "each of the four does"


def test_of_a_demonstration_what_its_mask_says_is_imitated() -> None:
    shown = Demonstration(make_prompt("a"), np.array([8, 9, 10]), np.array([True, False, True]))
    [slot] = make_slots([shown], 4, 1, SAMPLING, seed=0)
    assert slot.sample is not None
    assert slot.sample.loss_mask.tolist() == [False, False, False, True, False, True]


def test_a_demonstration_is_a_sample_from_the_start() -> None:
    [slot] = make_slots([Demonstration(make_prompt("a"), np.array([8, 9]))], 4, 1, SAMPLING, seed=0)
    assert slot.request is None
    assert slot.sample is not None
    assert slot.sample.id == "a@4#0"
    assert slot.sample.token_ids.tolist() == [1, 2, 3, 8, 9]
    assert slot.sample.loss_mask.tolist() == [False, False, False, True, True]


def test_lengths_and_exclusions_are_counted() -> None:
    samples = [
        finished("a", 4),
        finished("b", 8, reason="length"),
        finished("c", 2, exclusion="reward failed: math: KeyError"),
        finished("d", 2, exclusion="reward failed: math: ValueError"),
        finished("e", 4, exclusion="equal rewards"),
    ]
    metrics = {name: metric.value for name, metric in sample_metrics(samples).items()}
    assert metrics == {
        "samples/total": 5,
        "samples/excluded": 3,
        "samples/excluded/reward_failed": 2,
        "samples/excluded/equal_rewards": 1,
        "prompt_length/mean": 3,
        "response_length/mean": 4,
        "response_length/max": 8,
        "response_length/min": 2,
        "response_length/clip_ratio": 0.2,
    }


def mismatch(samples: list[Sample], sampling: SamplingParams) -> Metrics:
    batch = both_logprobs(samples, sampling, "trainer_logprobs")
    return generator_mismatch(batch) if batch.num_sequences else {}


def test_the_mismatch_is_measured_where_both_logprobs_are_of_one_distribution() -> None:
    sample = finished("a", 2)
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.5], np.float32)
    metrics = mismatch([sample], SAMPLING)
    difference = abs(torch.tensor([-1.0, -1.5]).exp() - torch.tensor([-1.0, -1.0]).exp()).mean()
    assert metrics["mismatch/prob_diff_mean"].value == pytest.approx(float(difference), rel=1e-6)


def test_tokens_that_older_weights_sampled_are_no_mismatch() -> None:
    sample = finished("a", 2)
    assert sample.completion is not None
    sample.completion = replace(sample.completion, version_spans=(VersionSpan(0, 1, 6), VersionSpan(1, 2, 7)))
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -9.0, -1.0], np.float32)
    metrics = generator_mismatch(both_logprobs([sample], SAMPLING, "trainer_logprobs"))
    assert metrics["mismatch/logprob_diff_max"].value == 0.0, "the first token's weights are not the trainer's"
    assert sample.loss_mask.sum() == 2, "it is still trained on"


def test_no_mismatch_is_claimed_between_different_distributions() -> None:
    sample = finished("a", 2)
    sample.token_data["trainer_logprobs"] = np.zeros(5, np.float32)
    assert mismatch([sample], SamplingParams(8, top_p=0.9)) == {}, "the trainer does not cut to top-p"
    assert mismatch([finished("a", 2)], SAMPLING) == {}, "there are no trainer logprobs"


def test_raw_logprobs_are_compared_where_sampling_cut_the_distribution() -> None:
    cut = SamplingParams(8, top_p=0.9)
    completion = Completion(
        "a", np.arange(2), np.full(2, -0.1, np.float32), cut.basis, "stop", cut, (), np.full(2, -1.0, np.float32)
    )
    sample = sample_from_completion("a", "a", make_prompt("a"), completion)
    sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.5], np.float32)
    difference = (math.exp(-1.0) - math.exp(-1.5)) / 2
    metrics = mismatch([sample], cut)
    assert metrics["mismatch/prob_diff_mean"].value == pytest.approx(difference, rel=1e-6)
    warm = SamplingParams(8, temperature=0.5, top_p=0.9)
    assert mismatch([sample], warm) == {}, "the trainer's are of temperature 0.5, the raw ones are not"


def test_what_a_completion_says_of_its_basis_counts_and_not_what_was_asked_for() -> None:
    good, strange = finished("a", 2), finished("b", 2)
    for sample in (good, strange):
        sample.token_data["trainer_logprobs"] = np.array([0, 0, 0, -1.0, -1.0], np.float32)
    assert strange.completion is not None
    strange.completion = replace(
        strange.completion, basis=SamplingParams(8, 0.5, top_k=5).basis, logprobs=np.zeros(2, np.float32)
    )
    strange.token_data["generator_logprobs"] = np.zeros(5, np.float32)
    assert mismatch([good, strange], SAMPLING)["mismatch/prob_diff_mean"].value == 0.0
    assert mismatch([strange], SAMPLING) == {}


async def test_a_step_runs_the_flow_and_the_algorithm_over_all_samples() -> None:
    class Scheduler:
        graph = SimpleNamespace(nodes=())

        async def run(self, slots: Any, timers: Any) -> list[Sample]:
            return [finished(slot.sample_id, 4) for slot in slots]

    class Algorithm:
        group_size = 2

        def prepare_samples(self, samples: Any) -> Any:
            samples[0].exclusion = "equal rewards"
            return {"reward": Metric(3.0, 4)}

    scheduler, algorithm = Scheduler(), Algorithm()
    environment = Environment(scheduler, algorithm, SAMPLING, seed=0, policy="trainer")  # type: ignore[arg-type]  # the part that is used
    experience = await environment.make(2, [make_prompt("a"), make_prompt("b")], Timers())
    assert experience.step == 2
    assert [sample.id for sample in experience.admitted] == ["a@2#1", "b@2#0", "b@2#1"]
    assert experience.metrics["reward"].value == 0.75
    assert experience.metrics["samples/excluded/equal_rewards"].value == 1, "counted after the algorithm had its say"
