"""The manager: who may start, where and in which order; what is made again, and what is given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chatlearn_core.config.models import RolloutConfig
from chatlearn_core.exceptions import BackendError, BackendTimeoutError, ContractError, ReplicaLostError
from chatlearn_core.executor.rollouts.manager import RolloutManager, Rollouts
from chatlearn_core.executor.step_samples import RolloutRequest
from chatlearn_core.runtime.boundary import Origin
from chatlearn_core.types import ExampleDraw, Prompt


def manager_for(fleet: Any, **settings: Any) -> RolloutManager:
    return RolloutManager(lambda: fleet, RolloutConfig(**settings))


def submit(manager: RolloutManager, *requests: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(manager.generate(request)) for request in requests]


async def test_without_a_bound_a_wave_starts_at_once_longest_first(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(2)
    wave = [requests.make(f"r{i}", tokens=n) for i, n in enumerate((4, 9, 7, 8))]
    tasks = submit(manager_for(fleet), *wave)
    await fleet.settled()
    assert fleet.started == [(0, "r1"), (0, "r0"), (1, "r3"), (1, "r2")], "9+4 tokens here, 8+7 there"
    for request in wave:
        await fleet.end(request.id)
    assert [task.result().request_id for task in tasks] == ["r0", "r1", "r2", "r3"]


async def test_a_replica_has_so_many_open_and_is_refilled_as_they_end(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(2)
    wave = [requests.make(f"r{i}", tokens=20 - i) for i in range(8)]
    tasks = submit(manager_for(fleet, max_concurrent=2), *wave)
    await fleet.settled()
    assert fleet.on(0) == ["r0", "r3"]
    assert fleet.on(1) == ["r1", "r2"]
    await fleet.end("r3")
    assert fleet.on(0) == ["r0", "r3", "r4"], "a place is free there, and only there"
    assert fleet.on(1) == ["r1", "r2"]
    while fleet.open:
        await fleet.end(fleet.open[0])
    assert all(task.done() for task in tasks)
    assert sorted(fleet.on(0) + fleet.on(1)) == sorted(request.id for request in wave), "each once"


async def test_a_group_stays_on_its_replica(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(3)
    manager = manager_for(fleet, max_concurrent=1)
    tasks = submit(manager, *(requests.make(f"{g}{i}", group=g) for g in "abcdef" for i in range(4)))
    await fleet.settled()
    while fleet.open:
        await fleet.end(fleet.open[-1])
    assert all(task.done() for task in tasks)
    for replica in range(3):
        groups = [name[0] for name in fleet.on(replica)]
        assert len(groups) == 8, "two groups each"
        assert all(groups.count(group) == 4 for group in groups)


async def test_an_idle_replica_takes_over_a_waiting_group_only_if_asked_to(requests: Any, held_fleet: Any) -> None:
    for work_stealing in (False, True):
        fleet = held_fleet(2)
        manager = manager_for(fleet, max_concurrent=1, work_stealing=work_stealing)
        lengths = {"a": 9, "b": 8, "c": 4, "d": 4}
        tasks = submit(
            manager, *(requests.make(f"{g}{i}", group=g, tokens=n) for g, n in lengths.items() for i in (0, 1))
        )
        await fleet.settled()
        assert (fleet.on(0), fleet.on(1)) == (["a0"], ["b0"])
        for name in ("b0", "b1", "c0", "c1"):
            await fleet.end(name)
        # Replica 1 has done its share; a1 and d0, d1 wait for a0 on replica 0.
        assert fleet.on(1)[4:] == (["d0"] if work_stealing else [])
        while fleet.open:
            await fleet.end(fleet.open[0])
        assert all(task.done() for task in tasks)
        assert fleet.on(0) == (["a0", "a1"] if work_stealing else ["a0", "a1", "d0", "d1"])


async def test_a_failed_request_is_made_again_in_its_place_and_then_given_up(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(2)
    manager = manager_for(fleet, max_retries=2)
    good, bad = submit(manager, requests.make("good"), requests.make("bad"))
    await fleet.end("good", BackendError("out of memory"))
    await fleet.end("good")
    for number in range(3):
        await fleet.end("bad", BackendError(f"no luck {number}"))
    assert good.result().request_id == "good"
    with pytest.raises(BackendError, match="no luck 2"):
        await bad
    assert fleet.started == [(0, "good"), (1, "bad"), (0, "good"), (1, "bad"), (1, "bad")]
    assert manager.num_retries == 3
    assert manager.metrics()["rollout/retries"].value == 3
    manager.begin()
    assert "rollout/retries" not in manager.metrics()


@pytest.mark.parametrize("error", [ReplicaLostError("replica 0 died"), BackendTimeoutError("nothing in 1800 s")])
async def test_what_another_attempt_cannot_help_is_not_made_again(
    error: BackendError, requests: Any, held_fleet: Any
) -> None:
    fleet = held_fleet(1)
    [task] = submit(manager_for(fleet, max_retries=5), requests.make("r"))
    await fleet.end("r", error)
    with pytest.raises(type(error)):
        await task
    assert len(fleet.started) == 1


async def test_a_request_that_takes_too_long_is_ended_in_the_engine(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(1)
    manager = manager_for(fleet, request_timeout_s=0.01, max_concurrent=1, max_retries=3)
    slow, waiting = submit(manager, requests.make("slow", tokens=9), requests.make("waiting"))
    with pytest.raises(BackendTimeoutError, match=r"request 'slow' on replica 0 .* 0\.01 s .*request_timeout_s"):
        await slow
    assert fleet.calls == ["abort ['slow']"]
    with pytest.raises(BackendTimeoutError, match="request 'waiting'"):
        await waiting
    assert fleet.started == [(0, "slow"), (0, "waiting")], "time in the queue does not count, and there is no retry"
    assert fleet.open == []


async def test_a_timeout_of_the_fleets_own_is_not_taken_for_ours(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(1)
    [task] = submit(manager_for(fleet, request_timeout_s=60.0), requests.make("r"))
    await fleet.end("r", TimeoutError("inside"))
    with pytest.raises(TimeoutError, match="inside"):
        await task
    assert fleet.calls == []


@pytest.mark.parametrize("at", ["arrived", "queued", "let in", "running"])
async def test_whoever_stops_waiting_leaves_nothing_behind(at: str, requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(1)
    manager = manager_for(fleet, max_concurrent=1)
    if at == "queued":
        [first] = submit(manager, requests.make("first"))
        await fleet.settled()
    [task] = submit(manager, requests.make("r"))
    if at == "arrived":
        await asyncio.sleep(0)
    elif at == "let in":
        for _ in range(2):
            await asyncio.sleep(0)
    else:
        await fleet.settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if at == "queued":
        await fleet.end("first")
        await first
    assert [name for _, name in fleet.started] == {"queued": ["first"], "running": ["r"]}.get(at, [])
    [after] = submit(manager, requests.make("after"))
    await fleet.end("after")
    assert (await after).request_id == "after"


async def test_requests_made_later_join_what_is_open(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(2)
    manager = manager_for(fleet)
    first = submit(manager, requests.make("a", tokens=9), requests.make("b", tokens=2))
    await fleet.settled()
    second = submit(manager, requests.make("c", tokens=5))
    await fleet.settled()
    assert fleet.started == [(0, "a"), (1, "b"), (1, "c")], "the replica with 2 tokens open, not the one with 9"
    await fleet.end("a")
    third = submit(manager, requests.make("d", tokens=1))
    await fleet.settled()
    assert fleet.started[3:] == [(0, "d")], "what has ended is no work any more"
    for name in "bcd":
        await fleet.end(name)
    await asyncio.gather(*first, *second, *third)


async def test_each_generator_role_has_a_manager_of_its_own(requests: Any, held_fleet: Any) -> None:
    fleets = {"one": held_fleet(1), "two": held_fleet(1)}
    runtime = SimpleNamespace(generator=fleets.__getitem__)
    rollouts = Rollouts(runtime, RolloutConfig())  # type: ignore[arg-type]  # the part that is used
    heard: list[tuple[str, int, int]] = []
    rollouts.on_open = lambda *facts: heard.append(facts)
    rollouts.begin()
    request = requests.make("r")
    request = RolloutRequest("r", ExampleDraw(Prompt("p", request.prompt_ids, "?"), 0, "r"), request)
    task = asyncio.create_task(rollouts.completion("two", request))
    await fleets["two"].end("r")
    assert (await task).request_id == "r"
    assert fleets["one"].started == []
    assert rollouts.of("two") is rollouts.of("two")
    assert heard == [("two", 0, 1), ("two", 0, 0)], "role, replica and open requests"
    assert rollouts.metrics() == {}


async def test_a_request_of_a_role_keeps_the_bounds_of_rollouts(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(1)
    runtime: Any = SimpleNamespace(generator={"judge": fleet}.__getitem__)
    rollouts = Rollouts(runtime, RolloutConfig(max_concurrent=1, max_retries=1))
    first, second = (asyncio.create_task(runtime.ask_generator("judge", requests.make(name))) for name in "ab")
    await fleet.settled()
    assert fleet.open == ["a"], "max_concurrent"
    await fleet.end("a", BackendError("out of memory"))
    assert fleet.open == ["a"], "max_retries"
    await fleet.end("a")
    await fleet.end("b")
    assert [(await task).request_id for task in (first, second)] == ["a", "b"]
    assert rollouts.metrics()["rollout/retries"].value == 1


async def test_a_step_that_is_cancelled_with_requests_in_the_queue_gives_every_place_back(
    requests: Any, held_fleet: Any
) -> None:
    fleet = held_fleet(1)
    manager = manager_for(fleet, max_concurrent=2)
    tasks = submit(manager, *(requests.make(f"r{index}") for index in range(6)))
    await fleet.settled()
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    after = submit(manager, requests.make("first"), requests.make("second"))
    await fleet.end("first")
    await fleet.end("second")
    assert [(await task).request_id for task in after] == ["first", "second"]


async def test_a_wave_goes_past_replicas_that_take_no_requests_and_so_do_groups_that_have_their_prefix_there(
    requests: Any, held_fleet: Any
) -> None:
    fleet = held_fleet(3)
    manager = manager_for(fleet)
    first = submit(manager, *(requests.make(f"{g}0", group=g) for g in "abc"))
    await fleet.settled()
    assert fleet.started == [(0, "a0"), (1, "b0"), (2, "c0")]
    fleet.accepting = frozenset({0, 2})
    second = submit(manager, *(requests.make(f"{g}1", group=g) for g in "abc"))
    await fleet.settled()
    assert fleet.started[3:] == [(0, "a1"), (0, "b1"), (2, "c1")], "b's prefix is on replica 1"
    fleet.accepting = frozenset({0, 1, 2})
    third = submit(manager, requests.make("b2", group="b"), requests.make("d0", group="d"))
    await fleet.settled()
    assert fleet.started[6:] == [(0, "b2"), (1, "d0")], "now b's prefix is on replica 0"
    for name in list(fleet.open):
        await fleet.end(name)
    await asyncio.gather(*first, *second, *third)


async def test_where_no_replica_takes_requests_the_fleet_is_asked_all_the_same(requests: Any, held_fleet: Any) -> None:
    fleet = held_fleet(2)
    fleet.accepting = frozenset()
    tasks = submit(manager_for(fleet), requests.make("a"), requests.make("b"))
    await fleet.settled()
    assert fleet.started == [(0, "a"), (1, "b")], "it knows how long they may wait"
    for name in "ab":
        await fleet.end(name)
    await asyncio.gather(*tasks)


async def test_what_waits_for_a_replica_that_takes_no_requests_any_more_goes_to_others_and_some_comes_back(
    requests: Any, held_fleet: Any
) -> None:
    fleet = held_fleet(2)
    manager = manager_for(fleet, max_concurrent=1)
    tasks = submit(manager, *(requests.make(f"{g}{i}", group=g, tokens=9) for g in "abcd" for i in (0, 1)))
    await fleet.settled()
    assert fleet.started == [(0, "a0"), (1, "b0")]
    fleet.accepting = frozenset({1})
    await fleet.end("b0")
    await fleet.end("b1")
    assert fleet.on(1) == ["b0", "b1", "d0"]
    await fleet.end("a0")
    assert fleet.on(0) == ["a0"], "it has a place, and takes nothing"
    fleet.accepting = frozenset({0, 1})
    await fleet.end("d0")
    assert len(fleet.on(0)) == 2, "it takes over what waits for the other"
    while fleet.open:
        await fleet.end(fleet.open[0])
    await asyncio.gather(*tasks)
    assert sorted(name for _, name in fleet.started) == sorted(f"{g}{i}" for g in "abcd" for i in (0, 1)), "each once"


async def test_a_request_that_stops_waiting_for_a_replica_that_is_gone_past_leaves_nothing_behind(
    requests: Any, held_fleet: Any
) -> None:
    fleet = held_fleet(2)
    manager = manager_for(fleet, max_concurrent=1)
    tasks = submit(manager, *(requests.make(f"r{i}", tokens=9 - i) for i in range(4)))
    await fleet.settled()
    assert (fleet.on(0), fleet.on(1)) == (["r0"], ["r1"])
    fleet.accepting = frozenset({1})
    tasks[3].cancel()  # it waits for replica 0
    await fleet.end("r1")
    await fleet.end("r2")
    await fleet.end("r0")
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(outcome, "request_id", None) for outcome in outcomes] == ["r0", "r1", "r2", None]
    [after] = submit(manager, requests.make("after"))
    await fleet.end("after")
    assert (await after).request_id == "after"
    assert fleet.on(1)[-1] == "after"


async def test_who_waits_for_a_place_hears_that_there_is_no_fleet_any_more(requests: Any, held_fleet: Any) -> None:
    fleets = [held_fleet(1)]
    manager = RolloutManager(lambda: fleets[0], RolloutConfig())
    manager.begin()
    fleets.clear()
    [task] = submit(manager, requests.make("r"))
    with pytest.raises(IndexError):
        await asyncio.wait_for(task, 5.0)


async def test_a_completion_that_breaks_the_contract_is_refused_and_not_asked_for_again(requests: Any) -> None:
    class Fleet:
        num_replicas, accepting, asked = 1, frozenset({0}), 0

        async def generate(self, request: Any, replica: int | None = None, on_tokens: Any = None) -> Any:
            self.asked += 1
            good = requests.complete(request)
            return replace(good, logprobs=good.logprobs[1:], raw_logprobs=None)

    fleet = Fleet()
    manager = RolloutManager(lambda: fleet, RolloutConfig(max_retries=3), origin=Origin("sampler", "generator 'acme'"))  # type: ignore[arg-type,return-value]  # the part that is used
    with pytest.raises(ContractError, match=r"role 'sampler', generator 'acme': the completion of sample 'r' breaks"):
        await manager.generate(requests.make("r", tokens=4))
    assert fleet.asked == 1


async def test_tokens_are_counted_and_told_as_they_come_where_it_is_asked_for(requests: Any) -> None:
    counted: list[int] = []
    told: list[tuple[int, list[int]]] = []

    class Fleet:
        num_replicas, accepting = 1, frozenset({0})

        async def generate(self, request: Any, replica: int | None = None, on_tokens: Any = None) -> Any:
            for start, count in ((0, 3), (3, 1)):
                if on_tokens is not None:
                    on_tokens(start, [7] * count)
            return requests.complete(request)

    for count_tokens, streams in ((counted.append, True), (None, True), (counted.append, False)):
        manager = RolloutManager(lambda: Fleet(), RolloutConfig(), streams=streams, count_tokens=count_tokens)  # type: ignore[arg-type,return-value]  # the part that is used
        await manager.generate(requests.make("r", tokens=4))
        await manager.generate(requests.make("r", tokens=4), lambda start, ids: told.append((start, ids)))
    assert counted == [3, 1] * 2, "of the generator that streams"
    assert told == [(0, [7] * 3), (3, [7])] * 2
