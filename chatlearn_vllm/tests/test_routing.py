from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatlearn_vllm.routing import Routing


def wire(key, prompt=(1, 2), max_tokens=10, prior=()):
    return {"key": key, "prompt_ids": list(prompt), "prior_ids": list(prior), "max_tokens": max_tokens}


def keys(shares):
    return [[request["key"] for request in share] for share in shares]


def test_requests_of_one_prompt_go_to_one_rank_as_long_as_one_of_them_is_open():
    routing = Routing(2)
    assert keys(routing.spread([wire(0, (5,)), wire(1, (6,)), wire(2, (5,)), wire(3, (5,))])) == [[0, 2, 3], [1]]
    routing.ended([0, 2])
    assert keys(routing.spread([wire(4, (5,), 1000)])) == [[4], []]
    routing.ended([3, 4])
    assert keys(routing.spread([wire(5, (9,), 20), wire(6, (5,))])) == [[5], [6]], "nothing of it is open any more"


def test_a_new_prompt_goes_to_the_rank_with_the_fewest_open_tokens():
    routing = Routing(3)
    shares = routing.spread([wire(0, (1,), 100), wire(1, (2,), 10, prior=(7,) * 20), wire(2, (3,), 10)])
    assert keys(shares) == [[0], [1], [2]]
    assert list(routing.open_tokens) == [101, 31, 11]
    assert keys(routing.spread([wire(3, (4,), 10), wire(4, (5,), 10), wire(5, (6,), 10)])) == [[], [5], [3, 4]]


def test_keys_that_are_not_open_are_ignored():
    routing = Routing(2)
    routing.spread([wire(0)])
    routing.ended([7, 0, 0])
    assert list(routing.open_tokens) == [0, 0]


REQUESTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50), st.booleans()), max_size=40)


@given(num_ranks=st.integers(1, 4), drawn=REQUESTS)
def test_every_request_has_one_rank_and_leaves_nothing_behind(num_ranks, drawn):
    routing, given_out = Routing(num_ranks), []
    for key, (prompt, max_tokens, ends) in enumerate(drawn):
        given_out += [key for share in keys(routing.spread([wire(key, (prompt,), max_tokens)])) for key in share]
        if ends:
            routing.ended([key])
    assert given_out == list(range(len(drawn)))
    assert sum(routing.open_tokens) == sum(1 + max_tokens for _, max_tokens, ends in drawn if not ends)
    routing.ended(given_out)
    assert set(routing.open_tokens) == {0}
