from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import RAW_BASIS, Completion, GenerateRequest, LogprobBasis, SamplingParams, VersionSpan
from chatlearn_generator_kit.request_checks import check_request


def request(prompt: list[int], **fields: Any) -> GenerateRequest:
    prior = fields.pop("prior", None)
    return GenerateRequest(
        "the request", np.array(prompt), SamplingParams(**({"max_tokens": 4} | fields)), resume_from=prior
    )


def prior(count: int, reason: str = "abort", basis: LogprobBasis = RAW_BASIS) -> Completion:
    params = SamplingParams(max_tokens=10)
    zeros = np.zeros(count)
    return Completion("p", zeros.astype(np.int64), zeros, basis, reason, params, (VersionSpan(0, count, 0),))


def check(wanted: GenerateRequest) -> None:
    check_request(wanted, wanted.sampling.basis, "the generator", model_length=10, vocab_size=50)


@pytest.mark.parametrize(
    "good", [request([1, 2]), request([49] * 6), request([1], prior=prior(4)), request([1], prior=prior(2, "length"))]
)
def test_valid_requests_pass(good) -> None:
    check(good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([]), "the prompt is empty"),
        (request([1, 50]), "prompt token 50 is outside the model's vocabulary of 50"),
        (request([-1, 3]), "prompt token -1 is outside"),
        (request([1] * 10), "the prompt has 10 tokens, but the model takes 10"),
        (request([1] * 8), "add up to 12, but the model takes 10; lower sampling.max_tokens to 2 or less"),
        (request([1], prior=prior(2, "stop")), "resumes a completion that has ended"),
        (request([1], prior=prior(5)), "resumes a completion of 5 tokens, but max_tokens 4"),
        (
            request([1], temperature=0.5, prior=prior(2)),
            "resumes logprobs of basis raw with sampling of basis processed",
        ),
    ],
)
def test_invalid_requests_are_refused_by_name(bad, message) -> None:
    with pytest.raises(BackendError, match=f"the generator, request 'the request': .*{message}"):
        check(bad)


def test_only_generators_that_score_take_tokens_to_score() -> None:
    wanted = replace(request([1, 2]), forced_ids=np.array([3, 4]))
    with pytest.raises(BackendError, match=r"this generator does not support \(GeneratorSpec.scores\)"):
        check(wanted)
    check_request(wanted, RAW_BASIS, "the generator", 10, 50, scores=True)
    with pytest.raises(BackendError, match="prompt token 50 is outside the model's vocabulary"):
        check_request(replace(wanted, forced_ids=np.array([50])), RAW_BASIS, "the generator", 10, 50, scores=True)


def test_only_classifiers_take_tokens_to_classify_and_they_take_nothing_else() -> None:
    wanted = replace(request([1] * 10), classify=True)
    with pytest.raises(BackendError, match=r"score of a sequence classifier, .* \(GeneratorSpec.classifies\)"):
        check(wanted)
    check_request(wanted, RAW_BASIS, "the generator", 10, 50, classifies=True)  # as long as the model takes
    longer = replace(request([1] * 11), classify=True)
    with pytest.raises(BackendError, match="it has 11 tokens, but the model takes 10"):
        check_request(longer, RAW_BASIS, "the generator", 10, 50, classifies=True)
    with pytest.raises(BackendError, match="request 'the request': it requests tokens, but this generator serves"):
        check_request(request([1, 2]), RAW_BASIS, "the generator", 10, 50, classifies=True)
