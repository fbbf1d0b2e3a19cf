from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from chatlearn_core.types import Completion, GenerateRequest, SamplingParams, VersionSpan
from chatlearn_sglang.engine_side.requests import spanning_stop
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


def test_a_stop_string_that_begins_in_the_resumed_text_is_found_at_the_token_that_completes_it() -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join("abcdefgh"[token] for token in token_ids)

    assert spanning_stop("xyab", ("bcd",), [2, 3, 4], 0, decode) == 1
    assert spanning_stop("xyab", ("bcd",), [2, 3, 4], 1, decode) == 0, "counted from the first token not seen yet"
    assert spanning_stop("xyab", ("cd",), [2, 3, 4], 0, decode) is None, "SGLang itself finds those in new text"
    assert spanning_stop("xyab", ("xy", "zz"), [2, 3, 4], 0, decode) is None, "lies before the resumed completion's end"
    assert spanning_stop("xyab", ("zz", "yabc"), [2, 3, 4], 0, decode) == 0
