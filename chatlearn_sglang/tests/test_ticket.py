from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Completion, GenerateRequest, LogprobBasis, SamplingParams, VersionSpan
from chatlearn_sglang.ticket import Ticket

SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, seed=9, stop=("x",))


def ticket(prior: Completion | None = None, **fields: Any) -> Ticket:
    request = GenerateRequest("the request", np.array([7, 8]), SAMPLING, resume_from=prior)
    return Ticket("000", request, fields.pop("on_tokens", None), asyncio.new_event_loop().create_future(), **fields)


def partial(count: int = 2, version: int = 3) -> Completion:
    spans = (VersionSpan(0, count, version),)
    ids, logprobs = np.arange(count), -np.ones(count, np.float32)
    return Completion("p", ids, logprobs, SAMPLING.basis, "abort", SAMPLING, spans, text="ab")


def reply(**fields: Any) -> dict[str, Any]:
    return {
        "token_ids": [4, 5, 6],
        "logprobs": [-0.5, -1.0, -1.5],
        "finish": {"type": "length", "length": 5},
        "text": "cd",
        "spans": [(0, 1, 3), (1, 3, 4)],
        "num_cached_tokens": 4,
    } | fields


def test_a_resumed_request_asks_for_the_rest() -> None:
    resumed = ticket(partial())
    assert resumed.context() == [7, 8, 0, 1]
    assert resumed.sampling()["max_tokens"] == 3
    assert resumed.sampling()["seed"] == 9


def test_an_answer_holds_what_was_resumed_first() -> None:
    completion = ticket(partial()).completion(reply())
    assert completion.token_ids.tolist() == [0, 1, 4, 5, 6]
    assert completion.logprobs.tolist() == [-1.0, -1.0, -0.5, -1.0, -1.5]
    assert completion.logprobs.dtype == np.float32
    assert completion.version_spans == (VersionSpan(0, 3, 3), VersionSpan(3, 5, 4))
    assert completion.text == "abcd"
    assert completion.basis == LogprobBasis(0.5, 1.0, 3)
    assert completion.num_cached_tokens == 2, "of the prompt's tokens"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"logprobs": [-0.5, None, -1.0]}, "logprob of token 3 is None"),
        ({"logprobs": [-0.5, -1.0, float("nan")]}, "logprob of token 4 is nan; the weights"),
        ({"logprobs": [-0.5]}, "returned 3 tokens and 1 logprobs"),
        ({"token_ids": [4], "logprobs": [-0.5]}, "reason 'length' after 1 of 3 tokens"),
        ({"token_ids": [4] * 4, "logprobs": [-0.5] * 4}, "after 4 of 3 tokens"),
        ({"token_ids": [], "logprobs": [], "finish": {"type": "stop"}}, "reason 'stop' without a token"),
        ({"finish": {"type": "abort", "message": "out of memory"}}, "ended it with 'abort': out of memory"),
        ({"finish": {}}, "ended it with None"),
    ],
)
def test_an_answer_that_cannot_be_one_says_why(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        ticket(partial()).completion(reply(**wrong))


def test_an_abort_that_was_asked_for_is_an_answer() -> None:
    asked = ticket(partial(), aborted=True)
    assert asked.completion(reply(finish={"type": "abort"}, token_ids=[4], logprobs=[-1.0])).finish_reason == "abort"
    empty = asked.empty()
    assert empty.token_ids.tolist() == [0, 1]
    assert empty.version_spans == (VersionSpan(0, 2, 3),)


def test_tokens_are_told_once_and_after_what_was_resumed() -> None:
    told: list[tuple[int, list[int]]] = []
    resumed = ticket(partial(), on_tokens=lambda start, tokens: told.append((start, tokens)))
    resumed.untold = [4]
    resumed.tell()
    resumed.tell()
    resumed.untold = [5, 6]
    resumed.tell()
    assert told == [(2, [4]), (3, [5, 6])]
