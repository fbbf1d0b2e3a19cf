"""Rollouts: what is asked for depends on (seed, prompt, step, index) alone, and groups come back whole."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from chatlearn_algorithms.example_kinds import Preferences
from chatlearn_core.executor.rollout_producer import (
    RolloutProducer,
    make_requests,
)
from chatlearn_core.flow import Graph, trace
from chatlearn_core.metrics import Timers
from chatlearn_core.types import (
    Answer,
    Completion,
    Example,
    ExampleDraw,
    Media,
    Preference,
    Prompt,
    Sample,
    SamplingParams,
    sample_from_completion,
)
from chatlearn_core.types.keyed_seed import keyed_seed

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


def drawn(example: Example, step: int | str) -> ExampleDraw:
    return ExampleDraw(example, step, f"{example.id}@{step}")


def test_one_slot_a_sample_group_by_group() -> None:
    requests = make_requests([drawn(make_prompt("a"), 3), drawn(make_prompt("b"), 3)], 2, SAMPLING, seed=7)
    assert [request.sample_id for request in requests] == ["a@3#0", "a@3#1", "b@3#0", "b@3#1"]
    assert [request.group_id for request in requests] == ["a@3", "a@3", "b@3", "b@3"]
    for request in requests:
        assert request.generate_request is not None
        assert (request.generate_request.id, request.generate_request.group_id) == (request.sample_id, request.group_id)
        assert request.generate_request.sampling == SamplingParams(
            8, 0.5, seed=keyed_seed(7, "sample", request.sample_id)
        )


def seeds(prompts: list[str], step: int | str, seed: int) -> dict[str, int]:
    requests = make_requests([drawn(make_prompt(name), step) for name in prompts], 2, SAMPLING, seed)
    return {
        request.sample_id: request.generate_request.sampling.seed for request in requests if request.generate_request
    }


def test_seeds_are_keyed_by_seed_prompt_step_and_index_and_nothing_else() -> None:
    alone, together = seeds(["b"], 1, 0), seeds(["a", "b", "c"], 1, 0)
    assert alone.items() <= together.items(), "what else is in the batch does not matter"
    everything = [*together.values(), *seeds(["a", "b", "c"], 2, 0).values(), *seeds(["a", "b", "c"], 1, 1).values()]
    assert len(set(everything)) == len(everything), "each of the four does"


def test_seeds_are_those_of_the_draw_whatever_the_ids_are() -> None:
    [again] = make_requests([ExampleDraw(make_prompt("a"), 4, "a~2@9")], 1, SAMPLING, seed=7)
    assert again.sample_id == "a@4#0"
    assert again.generate_request is not None
    assert again.generate_request.sampling.seed == keyed_seed(7, "sample", "a~2@9#0")


def test_media_go_with_the_prompt() -> None:
    image = Media("image", b"...")
    [request] = make_requests([drawn(replace(make_prompt("a"), media=(image,)), 1)], 1, SAMPLING, seed=0)
    assert request.generate_request is not None
    assert request.generate_request.media == (image,)


def test_what_examples_bring_is_not_generated() -> None:
    """A preference brings a sample for each completion, whatever the group size is."""
    pair = Preference(make_prompt("a"), (Answer(np.array([8, 9])), Answer(np.array([7]))), ranks=(1.0, 0.0))
    requests = make_requests([drawn(pair, 4)], 5, SAMPLING, 0, kind=Preferences())
    assert [request.generate_request for request in requests] == [None, None]
    samples = [request.sample for request in requests]
    assert [sample and (sample.id, sample.token_ids.tolist(), sample.unit_id) for sample in samples] == [
        ("a@4#0", [1, 2, 3, 8, 9], "a@4"),
        ("a@4#1", [1, 2, 3, 7], "a@4"),
    ]


async def test_production_finishes_the_groups_that_are_missing() -> None:
    class Scheduler:
        graph = Graph("none", (), {})

        async def run(self, requests: Any, timers: Timers) -> None:
            with timers.measure("generate", role="generator"):
                for request in requests:
                    request.sample = finished(request.sample_id, 4)

    class Draws:
        def next_batch(self, size: int) -> list[ExampleDraw]:
            return [drawn(make_prompt(name), 2) for name in "abc"[:size]]

    producer = RolloutProducer(
        Scheduler(),  # type: ignore[arg-type]  # the part that is used
        SimpleNamespace(group_size=2),  # type: ignore[arg-type]  # the part that is used
        Draws(),  # type: ignore[arg-type]  # the part that is used
        SAMPLING,
        seed=0,
    )
    production = await producer.produce(1, 2)
    assert [group.id for group in production.groups] == ["a@2", "b@2"]
    assert [sample.id for sample in production.groups[1].samples] == ["b@2#0", "b@2#1"]
    assert [span.action for span in production.timers.spans] == ["generate"], "timers of its own"


def test_the_flow_says_how_its_call_samples() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        return m.generator.generate(prompts, temperature=0, max_tokens=3, stop=["."], n=1)

    calls = trace(flow, {"generator": "generator"}).calls("generator.generate")
    [request] = make_requests([drawn(make_prompt("a"), 1)], 4, SAMPLING, 7, calls)
    [plain] = make_requests([drawn(make_prompt("a"), 1)], 1, SAMPLING, 7)
    assert request.generate_request is not None
    assert plain.generate_request is not None
    seed = plain.generate_request.sampling.seed
    assert request.generate_request.sampling == SamplingParams(3, temperature=0, stop=(".",), seed=seed)


def test_the_first_call_has_todays_seeds_and_a_second_one_has_its_own() -> None:
    def flow(prompts: Any, m: Any) -> Any:
        first, second = m.generator.generate(prompts), m.generator.generate(prompts, name="rival", n=1)
        return m.join_groups(first, second, m.judge.generate(prompts))

    calls = trace(flow, {"generator": "generator", "judge": "generator"}).calls("generator.generate")
    draws = [drawn(make_prompt("a"), 1), drawn(make_prompt("b"), 1)]
    requests = make_requests(draws, 2, SAMPLING, 7, calls)
    ids = [request.sample_id for request in requests]
    assert ids[:5] == ["a@1#0", "a@1#1", "a@1#rival.0", "a@1#judge_3.0", "a@1#judge_3.1"]
    assert [request.maker for request in requests[:5]] == [0, 0, 1, 2, 2]
    seeds = [request.generate_request.sampling.seed for request in requests if request.generate_request]
    assert len(set(seeds)) == len(seeds) == 10
    alone = [r.generate_request.sampling for r in make_requests(draws, 2, SAMPLING, 7) if r.generate_request]
    assert alone == [r.generate_request.sampling for r in requests if r.maker == 0 and r.generate_request]
