"""Routing: groups stay together, work is spread, and the same requests always go to the same places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatlearn_core.executor.rollouts.routing import Routing, Work, longest_first, work_of
from chatlearn_core.types import GenerateRequest, SamplingParams


def test_work_is_what_may_still_be_sampled_and_what_has_to_be_computed_before(requests: Any) -> None:
    request = requests.make("a", tokens=8, prompt=3)
    assert work_of(request) == Work(new_tokens=8, context_tokens=3)
    resumed = replace(request, resume_from=requests.complete(request, 5))
    assert work_of(resumed) == Work(new_tokens=3, context_tokens=8)


def test_the_longest_comes_first_then_the_longer_context_then_the_earlier(requests: Any) -> None:
    wave = [
        requests.make("short", tokens=4),
        requests.make("long", tokens=9),
        requests.make("same", tokens=4),
        requests.make("long prompt", tokens=4, prompt=7),
        replace(requests.make("resumed", tokens=9), resume_from=requests.complete(requests.make("x", tokens=9), 3)),
    ]
    assert [wave[i].id for i in longest_first(wave)] == ["long", "resumed", "long prompt", "short", "same"]


def test_a_group_is_not_torn_apart_and_goes_where_the_least_is_open(requests: Any) -> None:
    routing = Routing(2)
    groups = {"a": 9, "b": 4, "c": 4, "d": 2}
    wave = [requests.make(f"{g}{i}", group=g, tokens=n) for g, n in groups.items() for i in range(2)]
    # 18 tokens to replica 0; 8 and 8 to replica 1, then 4 where 16 are open and not 18.
    assert routing.assign(wave) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [work.new_tokens for work in routing.open_work] == [18, 20]


def test_equal_work_is_spread_evenly(requests: Any) -> None:
    routing = Routing(3)
    replicas = routing.assign([requests.make(f"r{i}") for i in range(9)])
    assert sorted(replicas) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_group_comes_back_to_its_prefix_until_that_is_forgotten(requests: Any) -> None:
    routing = Routing(2)
    first = [requests.make("a0", group="a"), requests.make("b0", group="b")]
    assert routing.assign(first) == [0, 1]
    for request, replica in zip(first, (0, 1), strict=True):
        routing.done(request, replica)
    again = [requests.make("b1", group="b"), requests.make("a1", group="a")]
    assert routing.assign(again) == [1, 0]
    routing.done(again[0], 1)
    routing.forget()
    # Replica 0 still has a1 open; b has nothing open anywhere, so it is free to go where there is less work.
    assert routing.assign([requests.make("a2", group="a"), requests.make("b2", group="b")]) == [0, 1]
    assert routing.assign([requests.make("c0", group="c", tokens=1)]) == [1]


def test_a_group_leaves_a_prefix_that_is_on_a_replica_which_takes_no_requests(requests: Any) -> None:
    routing = Routing(3)
    assert routing.assign([requests.make(f"{g}0", group=g) for g in "abc"]) == [0, 1, 2]
    assert routing.assign([requests.make(f"{g}1", group=g) for g in "bc"], frozenset({0, 2})) == [0, 2]
    assert routing.assign([requests.make("b2", group="b")]) == [0], "that is where its prefix is now"
    assert routing.assign([requests.make("d0", group="d")], frozenset({0, 2})) == [2], "the least open work of the two"
    assert routing.assign([requests.make("e0", group="e")], frozenset()) == [1], "all, where none is named"


waves = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50), st.integers(1, 9)), max_size=12), min_size=1, max_size=4
)


@given(waves, st.integers(1, 5))
def test_open_work_returns_to_nothing_and_no_group_is_in_two_places(waves: Any, num_replicas: int) -> None:
    routing = Routing(num_replicas)
    homes: dict[str, int] = {}
    for number, wave in enumerate(waves):
        made = [
            GenerateRequest(f"{number}.{i}", [1] * prompt, SamplingParams(tokens), f"g{group}")
            for i, (group, tokens, prompt) in enumerate(wave)
        ]
        placed = routing.assign(made)
        for request, replica in zip(made, placed, strict=True):
            assert homes.setdefault(request.group_id, replica) == replica
            assert 0 <= replica < num_replicas
        for request, replica in zip(made, placed, strict=True):
            routing.done(request, replica)
        assert routing.open_work == [Work()] * num_replicas


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_no_replica_has_more_than_its_share_and_one_group(tokens: list[int], num_replicas: int) -> None:
    """Longest first to the least loaded: the makespan is at most 4/3 of the best (Graham 1969); here the simpler bound
    that no replica exceeds the mean by more than the largest group.
    """
    routing = Routing(num_replicas)
    routing.assign([GenerateRequest(f"r{i}", [1], SamplingParams(n)) for i, n in enumerate(tokens)])
    loads = [work.new_tokens for work in routing.open_work]
    assert sum(loads) == sum(tokens)
    assert max(loads) <= sum(tokens) / num_replicas + max(tokens)


def test_moving_a_request_moves_its_work_and_its_group(requests: Any) -> None:
    routing = Routing(2)
    request = requests.make("a0", group="a")
    assert routing.assign([request]) == [0]
    routing.move(request, 0, 1)
    assert [work.new_tokens for work in routing.open_work] == [0, 8]
    assert routing.assign([requests.make("a1", group="a")]) == [1]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_the_order_of_answers_does_not_matter_to_the_next_wave(requests: Any, order: list[int]) -> None:
    routing = Routing(2)
    wave = [requests.make(f"r{i}", tokens=3 + i) for i in range(4)]
    placed = routing.assign(wave)
    for index in order:
        routing.done(wave[index], placed[index])
    routing.forget()
    assert routing.assign([requests.make(f"n{i}", tokens=9 - i) for i in range(4)]) == [0, 1, 1, 0]
