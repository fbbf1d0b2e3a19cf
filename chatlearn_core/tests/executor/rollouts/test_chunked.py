"""Rounds: a completion grows by so much a step, under the weights of the step, and ends exactly once."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.executor.rollouts.chunked import ChunkedRollouts
from chatlearn_core.executor.rollouts.saved import load_rollouts, save_rollouts
from chatlearn_core.types import VersionSpan


def rounds_for(engine: Any, *, tokens: int = 4, rounds: int = 3, in_flight: int = 2) -> ChunkedRollouts:
    return ChunkedRollouts(engine.generate, round_tokens=tokens, max_rounds=rounds, in_flight_prompts=in_flight)


async def test_a_completion_goes_on_where_it_was_under_the_new_weights(
    scripted_engine: Any, play: Any, prompts: Any
) -> None:
    engine = scripted_engine({"p0@1#0": 6, "p0@1#1": 2})
    steps = play(rounds_for(engine), max_tokens=10)
    assert set(await steps.step(1, prompts[:2])) == {"p1@1#0", "p1@1#1"}
    assert steps.metrics == {
        "rollout/rounds": 1,
        "rollout/prompts": 1,
        "rollout/unfinished": 1,
        "rollout/pending": 2,
    }
    [carried, finished] = steps.pending[0].progress
    assert (carried.num_tokens, carried.ended, carried.rounds) == (4, False, 1)
    assert (finished.num_tokens, finished.ended, finished.rounds) == (2, True, 1)
    engine.version = 1
    ended = await steps.step(2, prompts[2:3])
    assert set(ended) == {"p0@1#0", "p0@1#1", "p2@2#0", "p2@2#1"}
    whole = ended["p0@1#0"]
    assert whole.token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.version_spans == (VersionSpan(0, 4, 0), VersionSpan(4, 6, 1))
    assert whole.logprobs.tolist() == pytest.approx([0, -0.001, -0.002, -0.003, -1.004, -1.005])
    assert whole.sampling.max_tokens == 10, "as it was asked for, not as a round cut it"
    assert whole.finish_reason == "stop"
    assert steps.pending == ()


async def test_a_round_asks_for_its_tokens_and_the_last_one_for_all(
    scripted_engine: Any, play: Any, prompts: Any
) -> None:
    engine = scripted_engine({"p0@1#0": 99})
    steps = play(rounds_for(engine, tokens=3, rounds=3), max_tokens=20, group_size=1)
    for step in range(1, 4):
        await steps.step(step, prompts[2 * step - 2 : 2 * step] if step == 1 else prompts[2 * step : 2 * step + 1])
    asked = [
        (r.sampling.max_tokens, r.resume_from and r.resume_from.finish_reason)
        for r in engine.requests
        if r.id == "p0@1#0"
    ]
    assert asked == [(3, None), (6, "abort"), (20, "abort")], "what is resumed is no finished completion"
    assert steps.pending == ()


async def test_a_step_that_completed_nothing_makes_another_round(scripted_engine: Any, play: Any, prompts: Any) -> None:
    engine = scripted_engine({"p0@1#0": 9, "p1@1#0": 11})
    steps = play(rounds_for(engine, rounds=9), max_tokens=20, group_size=1)
    assert set(await steps.step(1, prompts[:2])) == {"p0@1#0", "p1@1#0"}
    assert steps.metrics["rollout/rounds"] == 3


async def test_the_bound_of_the_request_itself_is_a_finish(scripted_engine: Any, play: Any, prompts: Any) -> None:
    steps = play(rounds_for(scripted_engine({"p0@1#0": 99}), tokens=4, rounds=9), max_tokens=8, group_size=1)
    ended = await steps.step(1, prompts[:1])
    assert ended["p0@1#0"].finish_reason == "length"
    assert len(ended["p0@1#0"].token_ids) == 8


async def test_a_failed_sample_waits_for_its_group_and_is_told_then(
    scripted_engine: Any, play: Any, prompts: Any
) -> None:
    steps = play(rounds_for(scripted_engine({"p0@1#1": 6}, failing=["p0@1#0"])), max_tokens=10)
    assert set(await steps.step(1, prompts[:2])) == {"p1@1#0", "p1@1#1"}
    ended = await steps.step(2, prompts[2:3])
    assert isinstance(ended["p0@1#0"], BackendError)
    assert len(ended["p0@1#1"].token_ids) == 6


async def test_an_engine_that_stops_short_in_the_last_round_fails_the_sample(
    requests: Any, play: Any, prompts: Any
) -> None:
    class Lazy:
        async def generate(self, request: Any) -> Any:
            return requests.complete(request, 1, "length")

    ended = await play(rounds_for(Lazy(), rounds=2), max_tokens=9, group_size=1).step(1, prompts[:1])
    assert "ended after 1 of 9 tokens (length) in its last round" in str(ended["p0@1#0"])


async def test_a_lost_generator_reaches_everyone_who_waits_and_changes_nothing(
    scripted_engine: Any, play: Any, prompts: Any
) -> None:
    engine = scripted_engine({"p0@1#0": 6, "p0@1#1": 6})
    steps = play(rounds_for(engine), max_tokens=10)
    await steps.step(1, prompts[:2])
    before = [progress.num_tokens for progress in steps.pending[0].progress]
    assert before == [4, 4]

    class Lost:
        async def generate(self, request: Any) -> Any:
            if request.id == "p0@1#0":
                return await engine.generate(request)
            for _ in range(9):
                await asyncio.sleep(0)  # the other has ended by then
            raise ReplicaLostError("replica 0 died")

    steps.partial = rounds_for(Lost())
    with pytest.raises(ExceptionGroup) as caught:
        await steps.step(2, prompts[2:3])
    assert caught.group_contains(ReplicaLostError, match="replica 0 died")
    assert [progress.num_tokens for progress in steps.pending[0].progress] == before


async def test_nothing_is_sampled_before_the_flow_asks(scripted_engine: Any, play: Any, prompts: Any) -> None:
    engine = scripted_engine({})
    steps = play(rounds_for(engine), max_tokens=4)
    rollout_step = steps.partial.begin((), steps.requests(prompts[0], 1))
    playing = asyncio.create_task(steps.partial.play(rollout_step))
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.requests == [], "until then the generator may not have its memory"
    assert await rollout_step.completion("generator", rollout_step.requests[0]) is not None
    await playing


scripts = st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=2), min_size=14, max_size=14)


@settings(max_examples=60)
@given(
    scripts,
    st.sets(st.integers(0, 27), max_size=6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sets(st.integers(1, 20)),
)
def test_every_sample_ends_exactly_once_wherever_the_run_is_interrupted(
    scripted_engine: Any,
    play: Any,
    prompts: Any,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    failing: set[int],
    tokens: int,
    rounds: int,
    in_flight: int,
    interrupted: set[int],
) -> None:
    """Twenty-eight samples of random lengths, some of which fail, until all are through: with restarts from what is
    stored after some of the steps, and without, the same is trained in the same steps.
    """
    max_tokens = 24

    async def run(restart_after: set[int]) -> tuple[list[set[str]], dict[str, Any]]:
        by_id: dict[str, int] = {}
        engine = scripted_engine(by_id)
        steps = play(rounds_for(engine, tokens=tokens, rounds=rounds, in_flight=in_flight), max_tokens)
        drawn, number, done, trained = 0, 0, {}, []
        while drawn < len(lengths) or steps.pending:
            number += 1
            engine.version = number - 1
            wanted = min(steps.partial.num_prompts(steps.pending), len(lengths) - drawn)
            new = prompts[drawn : drawn + wanted]
            for index in range(drawn, drawn + wanted):
                for member in (0, 1):
                    name = f"p{index}@{number}#{member}"
                    by_id[name] = lengths[index][member]
                    if 2 * index + member in failing:
                        engine.failing.add(name)
            drawn += wanted
            ended = await steps.step(number, new)
            assert ended, "a step trains something"
            assert not ended.keys() & done.keys(), "nothing twice"
            assert len(steps.pending) <= in_flight
            done |= ended
            trained.append(set(ended))
            if number in restart_after:
                folder = tmp_path_factory.mktemp("checkpoint")
                save_rollouts(folder, steps.pending, {"groups": []})
                again = play(rounds_for(engine, tokens=tokens, rounds=rounds, in_flight=in_flight), max_tokens)
                again.pending = load_rollouts(folder, prompts, again.requests_of).pending
                steps = again
        assert len(done) == 2 * len(lengths), "nothing is lost"
        for name, outcome in done.items():
            if name in engine.failing:
                assert isinstance(outcome, BackendError)
                continue
            assert len(outcome.token_ids) == min(by_id[name], max_tokens)
            assert outcome.token_ids.tolist() == list(range(len(outcome.token_ids)))
            first = int(name.partition("@")[2].partition("#")[0]) - 1
            spans = outcome.version_spans
            assert spans[0].start == 0
            assert spans[-1].stop == len(outcome.token_ids)
            assert all(a.stop == b.start for a, b in pairwise(spans))
            assert [span.version for span in spans] == list(range(first, first + len(spans)))
            assert len(spans) <= rounds, "no older than max_rounds allows"
        return trained, {
            name: outcome if isinstance(outcome, BackendError) else outcome.logprobs.tolist()
            for name, outcome in done.items()
            if name not in engine.failing
        }

    plain = asyncio.run(run(set()))
    assert asyncio.run(run(interrupted)) == plain


def test_what_a_checkpoint_without_pending_rollouts_holds(tmp_path: Path) -> None:
    save_rollouts(tmp_path, (), {"groups": []})
    assert list(tmp_path.iterdir()) == []
    saved = load_rollouts(tmp_path, (), lambda draw: [])
    assert (saved.pending, saved.buffer) == ((), {"groups": []})
