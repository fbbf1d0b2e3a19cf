from __future__ import annotations

import asyncio

import numpy as np

from chatlearn_core.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from chatlearn_sglang.generator import SGLangRequest

SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, seed=9, stop=("x",))


def test_a_resumed_request_samples_the_rest_and_reports_tokens_once() -> None:
    told: list[tuple[int, list[int]]] = []
    spans = (VersionSpan(0, 2, 3),)
    prior = Completion("p", np.arange(2), -np.ones(2, np.float32), SAMPLING.basis, "abort", SAMPLING, spans)
    request = GenerateRequest("r", np.array([7, 8]), SAMPLING, resume_from=prior)
    future = asyncio.new_event_loop().create_future()
    resumed = SGLangRequest(7, request, SAMPLING.basis, future, lambda start, tokens: told.append((start, tokens)))
    assert resumed.rid == "00000000000000000007"
    assert resumed.context().tolist() == [7, 8, 0, 1]
    assert resumed.sampling()["max_tokens"] == 3
    assert resumed.sampling()["seed"] == 9
    resumed.unreported = [4]
    assert resumed.report_all("g")
    assert resumed.report_all("g")
    resumed.unreported = [5, 6]
    assert resumed.report_all("g")
    assert told == [(2, [4]), (3, [5, 6])]
