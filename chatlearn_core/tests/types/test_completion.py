"""The rules of sampling parameters, and which distribution a logprob is of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    LogprobBasis,
    SamplingParams,
    VersionSpan,
    continued_spans,
)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"temperature": -0.1}, r"temperature is -0.1; it must be 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_a_value_outside_its_range_is_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"max_tokens": 4} | setting))


def test_the_basis_is_that_of_the_distribution_sampled_from() -> None:
    assert SamplingParams(4).basis == RAW_BASIS
    assert SamplingParams(4, temperature=0.7, top_p=0.9, top_k=5).basis == LogprobBasis(0.7, 0.9, 5)


def test_greedy_logprobs_are_raw() -> None:
    assert SamplingParams(4, temperature=0.0, top_p=0.5).basis == RAW_BASIS


def test_a_basis_says_what_it_is() -> None:
    assert str(RAW_BASIS) == "raw"
    assert str(LogprobBasis(0.5, 0.9, 3)) == "processed(temperature=0.5, top_p=0.9, top_k=3)"


def completion(*spans: VersionSpan) -> Completion:
    count = spans[-1].stop
    numbers = np.zeros(count)
    return Completion("a", numbers.astype(int), numbers, RAW_BASIS, "abort", SamplingParams(count), spans)


def test_spans_go_on_from_the_completion_that_is_resumed() -> None:
    prior = completion(VersionSpan(0, 3, 1), VersionSpan(3, 5, 2))
    sampled = [VersionSpan(5, 6, 2), VersionSpan(6, 6, 3), VersionSpan(6, 9, 4)]
    assert continued_spans(prior, sampled) == (VersionSpan(0, 3, 1), VersionSpan(3, 6, 2), VersionSpan(6, 9, 4))


def test_spans_of_one_version_are_one_and_empty_ones_are_none() -> None:
    assert continued_spans(None, []) == ()
    assert continued_spans(None, [VersionSpan(0, 0, 1)]) == ()
    assert continued_spans(None, [VersionSpan(0, 2, 1), VersionSpan(2, 2, 2), VersionSpan(2, 4, 1)]) == (
        VersionSpan(0, 4, 1),
    )
