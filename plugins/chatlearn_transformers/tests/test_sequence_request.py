from __future__ import annotations

import asyncio

import numpy as np

from chatlearn_core.types import RAW_BASIS, Completion, GenerateRequest, SamplingParams, VersionSpan
from chatlearn_transformers.sequence_request import SequenceRequest


def test_missing_raw_logprobs_stay_missing():
    params = SamplingParams(max_tokens=10)
    one = np.zeros(1, np.float32)
    prior = Completion("p", np.zeros(1, np.int64), one, RAW_BASIS, "abort", params, (VersionSpan(0, 1, 1),))
    request = GenerateRequest("a", np.array([1, 2]), params, resume_from=prior)
    resumed = SequenceRequest(0, request, RAW_BASIS, asyncio.new_event_loop().create_future())
    assert resumed.max_length == 12
    two = np.zeros(2, np.float32)
    assert resumed.sampled(np.zeros(2, np.int64), two, two, "length", "").raw_logprobs is None
