"""Each rule of the boundary fails on what breaks it, and says role, plugin, sample and rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import ContractError
from chatlearn_core.runtime.boundary import Origin, check_completion, check_update, checked_rewards
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    GenerateRequest,
    Metric,
    Prompt,
    RewardResult,
    SamplingParams,
    VersionSpan,
    sample_from_completion,
)
from chatlearn_core.types.array_ref import ArrayRef

ORIGIN = Origin("sampler", "generator 'acme'", vocab_size=10)
REQUEST = GenerateRequest("p@1#0", np.array([1, 2]), SamplingParams(4))
NAN = float("nan")


def completion(**changes: Any) -> Completion:
    good = Completion(
        "p@1#0",
        np.array([3, 9, 0]),
        np.array([-1.0, 0.0, -2.0], np.float32),
        RAW_BASIS,
        "stop",
        REQUEST.sampling,
        (VersionSpan(0, 2, 4), VersionSpan(2, 3, 5)),
        np.array([-1.0, 0.0, -2.0], np.float32),
        "abc",
        token_data={"experts": np.zeros((3, 2), np.int8)},
    )
    return replace(good, **changes)


def test_a_good_completion_passes() -> None:
    check_completion(completion(), REQUEST, ORIGIN)
    rounded = np.array([1e-5, 0.0, -2.0], np.float32)
    check_completion(completion(logprobs=rounded, raw_logprobs=None, token_data={}), REQUEST, ORIGIN)
    whole = {
        "token_ids": np.arange(4, dtype=np.int32),
        "logprobs": np.zeros(4, np.float16),
        "raw_logprobs": None,
        "version_spans": (VersionSpan(0, 4, 0),),
        "token_data": {},
    }
    check_completion(completion(finish_reason="length", **whole), REQUEST, ORIGIN)
    nothing = {name: np.zeros(0, kind) for name, kind in (("token_ids", np.int64), ("logprobs", np.float32))}
    check_completion(
        completion(**nothing, raw_logprobs=None, token_data={}, version_spans=(), finish_reason="abort"),
        REQUEST,
        ORIGIN,
    )


def test_token_data_may_be_integers_masks_and_finite_numbers() -> None:
    data = {
        "experts": np.full((3, 2, 4), 2**62),
        "masked": np.array([True, False, True]),
        "margin": np.full((3, 2), np.finfo(np.float32).max, np.float32),
        "nothing": np.zeros((3, 0), np.float32),
    }
    check_completion(completion(token_data=data, num_cached_tokens=2), REQUEST, ORIGIN)


class Raises:
    """A value that cannot be compared."""

    __hash__ = None  # type: ignore[assignment]  # as of every class with __eq__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


BAD_COMPLETIONS: dict[str, tuple[Any, str]] = {
    "no completion": (["tokens"], "a list was returned, not a Completion"),
    "another request's": (completion(request_id="p@1#1"), "request_id is 'p@1#1'"),
    "ids as floats": (completion(token_ids=np.zeros(3)), r"token_ids has shape \(3,\) and dtype float64; .* integers"),
    "ids as a list": (completion(token_ids=[1, 2, 3]), "token_ids is a list, not an array"),
    "logprobs as integers": (completion(logprobs=np.zeros(3, int)), "logprobs has shape .* int64; .* floating-point"),
    "two dimensions": (completion(logprobs=np.zeros((3, 1), np.float32)), r"logprobs has shape \(3, 1\)"),
    "a logprob too few": (completion(logprobs=np.zeros(2, np.float32)), "logprobs has 2 entries for 3 tokens"),
    "a logprob too many": (completion(logprobs=np.zeros(4, np.float32)), "logprobs has 4 entries for 3 tokens"),
    "a raw logprob too few": (completion(raw_logprobs=np.zeros(2, np.float32)), "raw_logprobs has 2 entries for 3"),
    "token data too short": (completion(token_data={"experts": np.zeros(2)}), "token_data 'experts' has 2 entries for"),
    "token data as a list": (
        completion(token_data={"experts": [0, 0, 0]}),
        "token_data 'experts' is a list, not an arr",
    ),
    "no token data": (completion(token_data=None), "token_data is a NoneType, not a Mapping"),
    "no spans": (completion(version_spans=None), "version_spans is a NoneType, not a Sequence"),
    "no sampling": (completion(sampling=None), "sampling is a NoneType, not a SamplingParams"),
    "another temperature": (
        completion(sampling=SamplingParams(4, temperature=0.7)),
        r"it was sampled from .*temperature=0\.7.*, and .* was asked for",
    ),
    "no basis": (completion(basis="raw"), "basis is a str, not a LogprobBasis"),
    "text of bytes": (completion(text=b"abc"), "text is a bytes"),
    "an unknown reason": (completion(finish_reason="eos"), "finish_reason is 'eos'; it is one of stop, length, abort"),
    "cut short": (completion(finish_reason="length"), "finish_reason is 'length' after 3 tokens, and max_tokens is 4"),
    "a gap": (completion(version_spans=(VersionSpan(0, 1, 4), VersionSpan(2, 3, 5))), r"version_spans are \[\(0, 1, 4"),
    "an overlap": (
        completion(version_spans=(VersionSpan(0, 2, 4), VersionSpan(1, 3, 5))),
        "cover the 3 tokens in order",
    ),
    "uncovered": (completion(version_spans=()), r"version_spans are \[\]; they cover the 3 tokens"),
    "spans of tuples": (completion(version_spans=((0, 3, 1),)), r"version_spans are \[\(0, 3, 1\)\]"),
    "beyond the end": (completion(version_spans=(VersionSpan(0, 4, 4),)), "cover the 3 tokens"),
    "an id too large": (completion(token_ids=np.array([3, 10, 0])), "token 1 has id 10, outside the vocabulary of 10"),
    "a negative id": (completion(token_ids=np.array([3, 4, -1])), "token 2 has id -1, outside the vocabulary of 10"),
    "a NaN": (completion(logprobs=np.array([-1, NAN, -1], np.float32)), "logprobs of token 1 is nan; .* at most 0"),
    "minus infinity": (completion(logprobs=np.array([-1, -1, -np.inf], np.float32)), "logprobs of token 2 is -inf"),
    "a probability": (completion(logprobs=np.array([-1, 0.5, -1], np.float32)), "logprobs of token 1 is 0.5"),
    "token data of objects": (
        completion(token_data={"notes": np.array(["a", None, 3], object)}),
        "token_data 'notes' has dtype object; it is numbers or booleans",
    ),
    "token data of text": (completion(token_data={"notes": np.array(["a", "b", "c"])}), "'notes' has dtype <U1; it is"),
    "token data without a dimension": (
        completion(token_data={"margin": np.array(1.0)}),
        r"token_data 'margin' has shape \(\); its first dimension is the tokens",
    ),
    "a NaN of token data": (
        completion(token_data={"margin": np.array([[0.0, 1.0], [0.0, NAN], [0.0, 1.0]])}),
        "token_data 'margin' of token 1 is nan; it must be finite",
    ),
    "an infinity of token data": (
        completion(token_data={"margin": np.array([0.0, 1.0, -np.inf], np.float16)}),
        "token_data 'margin' of token 2 is -inf; it must be finite",
    ),
    "token data under a number": (
        completion(token_data={3: np.zeros(3)}),
        "token_data has the name 3, which is no text",
    ),
    "advantages of its own": (
        completion(token_data={"advantages": np.zeros(3)}),
        "token_data has 'advantages', a name",
    ),
    "a weight of its own": (
        completion(token_data={"loss_weight": np.zeros(3)}),
        "token_data has 'loss_weight', a name",
    ),
    "other logprobs": (
        completion(token_data={"generator_raw_logprobs": np.zeros(3)}),
        "token_data has 'generator_raw_logprobs', a name that the core writes itself",
    ),
    "its logprobs again": (
        completion(token_data={"generator_raw_logprobs": np.zeros(3)}),
        "token_data has 'generator_raw_logprobs', a name",
    ),
    "cached tokens as text": (completion(num_cached_tokens="2"), "num_cached_tokens is '2'; it is a number of tokens"),
    "cached tokens as a float": (completion(num_cached_tokens=2.0), "num_cached_tokens is 2.0; it is a number of"),
    "unknown cached tokens": (
        completion(num_cached_tokens=None),
        "num_cached_tokens is None; it is a number of",
    ),
    "fewer than no cached tokens": (completion(num_cached_tokens=-1), "num_cached_tokens is -1; it is a number of"),
    "an empty stop": (
        completion(
            token_ids=np.zeros(0, int), logprobs=np.zeros(0), raw_logprobs=None, version_spans=(), token_data={}
        ),
        "finish_reason is 'stop' without a token",
    ),
    "a span of text": (
        completion(version_spans=(VersionSpan(0, "3", 0),)),
        r"version_spans has \(0, '3', 0\); .* integers",
    ),
    "a span without version": (completion(version_spans=(VersionSpan(0, 3, None),)), "integers"),
    "a span of floats": (completion(version_spans=(VersionSpan(0, 3.0, 1),)), "integers"),
    "another seed": (
        completion(sampling=SamplingParams(4, seed=7)),
        "its sampling parameters have seed=7, which is not",
    ),
    "another limit": (completion(sampling=SamplingParams(5)), "its sampling parameters have max_tokens=5"),
    "values that raise": (completion(request_id=Raises()), "it cannot be read: RuntimeError: no comparison"),
    "a raw NaN": (completion(raw_logprobs=np.array([NAN, 0, 0], np.float32)), "raw_logprobs of token 0 is nan"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_a_bad_completion_is_refused_by_role_plugin_sample_and_rule(name: str) -> None:
    bad, rule = BAD_COMPLETIONS[name]
    start = "role 'sampler', generator 'acme': the completion of sample 'p@1#0' breaks the contract: "
    with pytest.raises(ContractError, match=f"{start}.*{rule}"):
        check_completion(bad, REQUEST, ORIGIN)


def test_what_nothing_could_stop_did_not_stop() -> None:
    for sampling, stops in (
        (SamplingParams(4, ignore_eos=True), False),
        (SamplingParams(4, ignore_eos=True, stop=("a",)), True),
        (SamplingParams(4, ignore_eos=True, stop_token_ids=(0,)), True),
    ):
        request = replace(REQUEST, sampling=sampling)
        if stops:
            check_completion(completion(sampling=sampling), request, ORIGIN)
        else:
            with pytest.raises(ContractError, match="finish_reason is 'stop' under ignore_eos"):
                check_completion(completion(sampling=sampling), request, ORIGIN)
        scored = replace(request, forced_ids=completion().token_ids)
        check_completion(completion(sampling=sampling), scored, ORIGIN)


def test_the_answer_of_a_classifier_is_a_finite_number_without_tokens() -> None:
    request = replace(REQUEST, classify=True)
    nothing: dict[str, Any] = {
        "token_ids": np.zeros(0, np.int64),
        "logprobs": np.zeros(0, np.float32),
        "raw_logprobs": None,
        "token_data": {},
        "version_spans": (),
    }
    check_completion(completion(**nothing, score=-2.5), request, ORIGIN)
    check_completion(completion(**nothing, finish_reason="abort"), request, ORIGIN)
    for score in (None, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ContractError, match=r"score is .*; the answer to a request that classifies is a finite"):
            check_completion(completion(**nothing, score=score), request, ORIGIN)
    with pytest.raises(ContractError, match="it has 3 tokens; a request that classifies samples none"):
        check_completion(completion(score=1.0), request, ORIGIN)


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(ContractError, match="it has 3 tokens, more than max_tokens=2"):
        check_completion(completion(sampling=SamplingParams(2)), replace(REQUEST, sampling=SamplingParams(2)), ORIGIN)


def test_a_resumed_completion_begins_with_what_it_resumes() -> None:
    prior = completion(token_ids=np.array([3, 9]), logprobs=np.zeros(2, np.float32))
    check_completion(completion(), replace(REQUEST, resume_from=prior), ORIGIN)
    other = replace(prior, token_ids=np.array([3, 8]))
    with pytest.raises(ContractError, match="does not begin with the 2 tokens that it resumes"):
        check_completion(completion(), replace(REQUEST, resume_from=other), ORIGIN)


def test_of_arrays_kept_elsewhere_the_length_is_checked() -> None:
    def stored(values: Any) -> Any:
        return ArrayRef([values], (), values.dtype)

    elsewhere = completion(token_ids=stored(np.array([3, 99, 0])), logprobs=stored(np.zeros(3, np.float32)))
    check_completion(elsewhere, REQUEST, ORIGIN)
    with pytest.raises(ContractError, match="logprobs has 2 entries for 3 tokens"):
        check_completion(replace(elsewhere, logprobs=stored(np.zeros(2, np.float32))), REQUEST, ORIGIN)


# Rewards: what a single result may be is in test_rewards.py


def test_rewards_of_the_wrong_number_or_type_are_a_problem_as_a_whole() -> None:
    samples = [sample_from_completion("a", "g", Prompt("p", np.array([1]), "?"), completion())] * 2
    assert checked_rewards(RewardResult(1.0), samples) == "returned a RewardResult, not a list of RewardResult"
    assert checked_rewards([RewardResult(1.0)], samples) == "returned 1 results for 2 samples"
    good, bad = checked_rewards([RewardResult(np.float32(0.5)), 1.0], samples)
    assert (good, type(good.value)) == (RewardResult(0.5), float)  # type: ignore[union-attr]  # no text here
    assert bad.error == "returned a float (1.0), not a RewardResult"  # type: ignore[union-attr]  # no text here


# Trainers


TRAINER = Origin("policy", "trainer 'acme'")


@pytest.mark.parametrize(
    ("metrics", "rule"),
    [
        ({}, "update reported no 'loss', only nothing"),
        ({"grad_norm": Metric(1.0)}, "update reported no 'loss', only grad_norm"),
        ({"loss": 1.0}, "update returned 'loss', not a mapping from names to Metric"),
        ([1.0], "update returned list, not a mapping"),
        ({"loss": Metric(NAN)}, "update reported loss = nan"),
        ({"loss": Metric(1.0), "grad_norm": Metric(np.inf)}, "update reported grad_norm = inf"),
        ({"loss": Metric("abc")}, "update reported loss = 'abc', which is no number"),
        ({"loss": Metric(1.0, None)}, "update reported the count of loss = None, which is no number"),
        ({"loss": Metric(1.0, reducer="z")}, "update reported loss with the reducer 'z'; it is one of mean, sum, max"),
        ({"loss": Metric(1.0, 0)}, "update reported loss as the mean of 1.0 over 0"),
        ({"loss": Metric(1.0, -1)}, "update reported loss as the mean of 1.0 over -1"),
        ({"loss": Metric(1.0), 3: Metric(1.0)}, "update reported a metric with the name 3, which is no text"),
        ({"loss": Metric(1.0), "kl": Metric(NAN)}, "update reported kl = nan; a metric is finite"),
        ({"loss": Metric(1.0), "kl": Metric(1.0, NAN)}, "update reported kl as the mean of 1.0 over nan"),
    ],
)
def test_an_update_that_says_nothing_or_is_not_finite_is_refused(metrics: Any, rule: str) -> None:
    with pytest.raises(ContractError, match=f"role 'policy', trainer 'acme': {rule}"):
        check_update(metrics, TRAINER)


def test_a_good_update_passes() -> None:
    check_update(
        {"loss": Metric(1.0), "lr": Metric(0.1), "experts": Metric(0.0, 0), "n": Metric(np.float32(2))}, TRAINER
    )
