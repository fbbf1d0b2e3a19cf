"""Kept rollouts: a step ends when enough is complete, the rest waits paused in the engine for the new weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import BackendError, ReplicaLostError
from chatlearn_core.executor.rollouts.paused import PausedRollouts
from chatlearn_core.executor.rollouts.saved import load_rollouts, save_rollouts


def kept_for(fleet: Any, *, per_step: int = 1, rounds: int = 9, in_flight: int = 3) -> PausedRollouts:
    async def generate(request: Any) -> Any:
        return await fleet.generate(request, 0)

    return PausedRollouts(
        generate, lambda: fleet, prompts_per_step=per_step, max_rounds=rounds, in_flight_prompts=in_flight
    )


async def test_a_step_ends_with_enough_complete_prompts_and_pauses_the_rest(
    held_fleet: Any, play: Any, prompts: Any
) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet)
    steps = play(partial, max_tokens=4)
    running = asyncio.create_task(steps.step(1, prompts[:3]))
    await fleet.end("p1@1#0")
    await fleet.end("p0@1#1")
    assert not running.done(), "no prompt is complete"
    await fleet.end("p1@1#1")
    assert set(await running) == {"p1@1#0", "p1@1#1"}
    assert fleet.calls == ["pause"]
    assert fleet.open == ["p0@1#0", "p2@1#0", "p2@1#1"], "they stay where they are"
    assert steps.metrics == {"rollout/rounds": 1, "rollout/prompts": 1, "rollout/unfinished": 3, "rollout/pending": 4}
    assert partial.num_prompts(steps.pending) == 1

    await partial.weights_changed()
    assert fleet.calls == ["pause", "resume"]
    running = asyncio.create_task(steps.step(2, prompts[3:4]))
    await fleet.settled()
    assert fleet.on(0).count("p0@1#0") == 1, "it is not asked for again"
    await fleet.end("p0@1#0")
    assert set(await running) == {"p0@1#0", "p0@1#1"}, "its other sample had ended a step before"
    await partial.close()


async def test_what_ended_between_two_steps_is_trained_in_the_next(held_fleet: Any, play: Any, prompts: Any) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet, in_flight=2)
    steps = play(partial, max_tokens=4, group_size=1)
    running = asyncio.create_task(steps.step(1, prompts[:2]))
    await fleet.end("p0@1#0")
    assert set(await running) == {"p0@1#0"}
    await partial.weights_changed()
    await fleet.end("p1@1#0")  # while something is evaluated, perhaps
    assert set(await steps.step(2, prompts[2:3])) == {"p1@1#0"}
    assert [group.id for group in steps.pending] == ["p2@2"]
    await partial.close()


async def test_nothing_is_paused_where_nothing_is_left(held_fleet: Any, play: Any, prompts: Any) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet)
    steps = play(partial, max_tokens=4, group_size=1)
    running = asyncio.create_task(steps.step(1, prompts[:1]))
    await fleet.end("p0@1#0")
    await running
    await partial.weights_changed()
    assert fleet.calls == []


async def test_a_completion_in_its_last_step_is_waited_for(held_fleet: Any, play: Any, prompts: Any) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet, rounds=2, in_flight=2)
    steps = play(partial, max_tokens=4, group_size=1)
    running = asyncio.create_task(steps.step(1, prompts[:2]))
    await fleet.end("p1@1#0")
    await running
    running = asyncio.create_task(steps.step(2, prompts[2:3]))
    await fleet.end("p2@2#0")
    assert not running.done(), "enough are complete, but p0 may not become any older"
    await fleet.end("p0@1#0")
    assert set(await running) == {"p0@1#0", "p2@2#0"}


async def test_failures_are_told_with_their_group_and_a_lost_generator_at_once(
    held_fleet: Any, play: Any, prompts: Any
) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet)
    steps = play(partial, max_tokens=4)
    running = asyncio.create_task(steps.step(1, prompts[:2]))
    await fleet.end("p0@1#0", BackendError("out of memory"))
    await fleet.end("p0@1#1")
    ended = await running
    assert str(ended["p0@1#0"]) == "out of memory"
    running = asyncio.create_task(steps.step(2, []))
    await fleet.end("p1@1#0", ReplicaLostError("replica 0 died"))
    with pytest.raises(ReplicaLostError, match="replica 0 died"):
        await running
    await partial.close()


async def test_closing_gives_up_what_is_in_the_engine(held_fleet: Any, play: Any, prompts: Any) -> None:
    fleet = held_fleet(1)
    partial = kept_for(fleet)
    steps = play(partial, max_tokens=4, group_size=1)
    running = asyncio.create_task(steps.step(1, prompts[:3]))
    await fleet.end("p0@1#0")
    await running
    assert len(fleet.open) == 2
    await partial.close()
    assert fleet.open == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await partial.close()


async def test_from_a_checkpoint_the_unfinished_begin_again_and_the_finished_do_not(
    held_fleet: Any, play: Any, prompts: Any, tmp_path: Path
) -> None:
    fleet = held_fleet(1)
    steps = play(kept_for(fleet), max_tokens=4)
    running = asyncio.create_task(steps.step(1, prompts[:2]))
    for name in ("p1@1#1", "p0@1#0", "p0@1#1"):
        await fleet.end(name)
    await running
    await steps.partial.close()
    save_rollouts(tmp_path, steps.pending, {"groups": []})

    fleet = held_fleet(1)
    steps = play(kept_for(fleet), max_tokens=4)
    steps.pending = load_rollouts(tmp_path, prompts, steps.requests_of).pending
    running = asyncio.create_task(steps.step(2, []))
    await fleet.end("p1@1#0")
    assert set(await running) == {"p1@1#0", "p1@1#1"}
    assert fleet.started == [(0, "p1@1#0")]
