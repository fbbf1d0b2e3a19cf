from __future__ import annotations

import asyncio

import numpy as np

from chatlearn_core.types import RAW_BASIS, Completion, GenerateRequest, SamplingParams, VersionSpan
from chatlearn_transformers.ticket import Ticket


def ticket(prior_spans=()):
    params = SamplingParams(max_tokens=10)
    count = prior_spans[-1].stop if prior_spans else 0
    zeros = np.zeros(count, np.float32)
    prior = Completion("p", np.zeros(count, np.int64), zeros, RAW_BASIS, "abort", params, prior_spans)
    request = GenerateRequest("a", np.array([1, 2]), params, resume_from=prior if prior_spans else None)
    return Ticket(request, asyncio.new_event_loop().create_future())


def test_spans_cover_the_completion_without_gaps_or_empty_ones():
    plain = ticket()
    plain.spans = [(0, 3), (4, 5), (4, 6), (7, 9)]  # version 5 sampled nothing, nor did 9
    assert plain.version_spans(7) == (VersionSpan(0, 4, 3), VersionSpan(4, 7, 6))
    assert plain.version_spans(8) == (VersionSpan(0, 4, 3), VersionSpan(4, 7, 6), VersionSpan(7, 8, 9))


def test_spans_of_a_resumed_completion_come_first_and_join():
    resumed = ticket((VersionSpan(0, 2, 1), VersionSpan(2, 5, 2)))
    assert resumed.context().tolist() == [1, 2, 0, 0, 0, 0, 0]
    resumed.spans = [(5, 2), (6, 3)]
    assert resumed.version_spans(8) == (VersionSpan(0, 2, 1), VersionSpan(2, 6, 2), VersionSpan(6, 8, 3))
    assert ticket((VersionSpan(0, 2, 1),)).version_spans(2) == (VersionSpan(0, 2, 1),)


def test_missing_raw_logprobs_stay_missing():
    resumed = ticket((VersionSpan(0, 1, 1),))
    zeros = np.zeros(2, np.float32)
    assert resumed.completion(np.zeros(2, np.int64), zeros, zeros, "length", "").raw_logprobs is None
