from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import RAW_BASIS, Completion, GenerateRequest, LogprobBasis, SamplingParams, VersionSpan
from chatlearn_generator_kit.pending_request import EngineRequest, PendingRequest

SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, seed=9, stop=("x",))


def partial(*spans: tuple[int, int, int], sampling: SamplingParams = SAMPLING) -> Completion:
    """An aborted completion of as many tokens as the spans (start, stop, version) cover."""
    count = spans[-1][1]
    ids, logprobs = np.arange(count), -np.ones(count, np.float32)
    made = tuple(VersionSpan(*span) for span in spans)
    return Completion("p", ids, logprobs, sampling.basis, "abort", sampling, made, text="ab")


def pending(prior: Completion | None = None, kind: type[Any] = PendingRequest, **fields: Any) -> Any:
    sampling = fields.pop("sampling", SAMPLING)
    request = GenerateRequest("the request", np.array([7, 8]), sampling, resume_from=prior)
    future = fields.pop("future", None) or asyncio.new_event_loop().create_future()
    return kind(0, request, sampling.basis, future, **fields)


def sampled(prior: Completion | None = None, **fields: Any) -> EngineRequest:
    """After a step of one token and one of two."""
    found: EngineRequest = pending(prior, EngineRequest, **fields)
    found.take([4], [-0.5], [(0, 3)])
    found.take([5, 6], [-1.0, -1.5], [(0, 4)])
    return found


def test_spans_cover_the_completion_without_gaps_or_empty_ones() -> None:
    plain = pending()
    plain.spans = [(0, 3), (4, 5), (4, 6), (7, 9)]  # version 5 sampled nothing, nor did 9
    assert plain.version_spans(7) == (VersionSpan(0, 4, 3), VersionSpan(4, 7, 6))
    assert plain.version_spans(8) == (VersionSpan(0, 4, 3), VersionSpan(4, 7, 6), VersionSpan(7, 8, 9))


def test_spans_of_a_resumed_completion_come_first_and_join() -> None:
    resumed = pending(partial((0, 2, 1), (2, 4, 2)))
    assert resumed.context().tolist() == [7, 8, 0, 1, 2, 3]
    assert resumed.max_new_tokens == 1
    resumed.spans = [(4, 2), (6, 3)]
    assert resumed.version_spans(8) == (VersionSpan(0, 2, 1), VersionSpan(2, 6, 2), VersionSpan(6, 8, 3))
    assert pending(partial((0, 2, 1))).version_spans(2) == (VersionSpan(0, 2, 1),)


def test_an_unstarted_request_is_answered_with_the_resumed_completion() -> None:
    empty = pending(partial((0, 2, 3))).unstarted()
    assert (empty.token_ids.tolist(), empty.text, empty.finish_reason) == ([0, 1], "ab", "abort")
    assert empty.version_spans == (VersionSpan(0, 2, 3),)
    fresh = pending().unstarted()
    assert (len(fresh.token_ids), fresh.version_spans, fresh.text) == (0, (), "")


def test_a_completion_starts_with_the_resumed_tokens() -> None:
    request = sampled(partial((0, 2, 3)))
    request.note_cached(4)
    assert request.problem("length") is None
    completion = request.whole("length", "abcd")
    assert completion.token_ids.tolist() == [0, 1, 4, 5, 6]
    assert completion.logprobs.tolist() == [-1.0, -1.0, -0.5, -1.0, -1.5]
    assert completion.logprobs.dtype == np.float32
    assert completion.version_spans == (VersionSpan(0, 3, 3), VersionSpan(3, 5, 4))
    assert (completion.text, completion.finish_reason) == ("abcd", "length")
    assert completion.basis == LogprobBasis(0.5, 1.0, 3)
    assert completion.raw_logprobs is None
    assert completion.num_cached_tokens == 2, "of the prompt's tokens"


def test_logprobs_of_the_raw_distribution_are_both() -> None:
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    completion = sampled(sampling=greedy).whole("length", "")
    assert completion.basis == RAW_BASIS
    assert completion.raw_logprobs is not None
    assert completion.raw_logprobs.tolist() == completion.logprobs.tolist()


@pytest.mark.parametrize(
    ("tokens", "logprobs", "reason", "problem"),
    [
        ([4, 5, 6], [-0.5, None, -1.0], "length", "logprob of token 3 is nan; the weights"),
        ([4, 5, 6], [-0.5], "length", "returned 3 tokens and 1 logprobs"),
        ([4], [-0.5], "length", "reason 'length' after 1 of 3 tokens"),
        ([4] * 4, [-0.5] * 4, "stop", "reason 'stop' after 4 of 3 tokens"),
        ([], [], "stop", "reason 'stop' without a token"),
        ([4], [-0.5], "abort", "ended it with 'abort': out of memory"),
        ([4], [-0.5], None, "ended it with None: out of memory"),
    ],
)
def test_an_invalid_answer_says_why(tokens, logprobs, reason, problem) -> None:
    request = pending(partial((0, 2, 3)), EngineRequest)
    request.take(tokens, logprobs, [(0, 3)])
    assert problem in request.problem(reason, "out of memory")


def test_a_requested_abort_is_a_valid_finish_reason() -> None:
    request = sampled(is_aborted=True)
    assert request.problem("abort") is None
    assert request.whole("abort", "cd").finish_reason == "abort"


async def test_tokens_are_reported_until_the_callback_raises() -> None:
    told: list[tuple[int, list[int]]] = []
    request = pending(on_tokens=lambda start, tokens: told.append((start, tokens)))
    assert request.report("the generator", 2, [4])
    assert request.report("the generator", 3, [])
    assert told == [(2, [4])]

    def broken(start: int, tokens: list[int]) -> None:
        raise ZeroDivisionError("of the caller")

    failing = pending(on_tokens=broken, future=asyncio.get_running_loop().create_future())
    assert not failing.report("the generator", 0, [4])
    with pytest.raises(BackendError, match="the generator, request 'the request': on_tokens raised ZeroDivisionError"):
        failing.future.result()


async def test_a_request_may_be_failed_from_another_thread() -> None:
    request = pending(future=asyncio.get_running_loop().create_future())
    thread = threading.Thread(target=lambda: request.fail(BackendError("gone")))
    thread.start()
    with pytest.raises(BackendError, match="gone"):
        await asyncio.wait_for(request.future, timeout=30)
    thread.join()
    assert not request.was_answered
    request.finish(request.unstarted())
    assert not request.was_answered, "the first outcome stays"
