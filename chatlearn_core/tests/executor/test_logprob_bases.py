"""A completion states the basis that its generator declares, or the run ends before anything is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chatlearn_core.exceptions import PluginError
from chatlearn_core.executor.logprob_bases import DeclaredBases, declared_bases
from chatlearn_core.plugins.records import GeneratorSpec
from chatlearn_core.runtime.plan import BackendPlan, RolePlan
from chatlearn_core.types import (
    RAW_BASIS,
    Completion,
    LogprobBasis,
    Prompt,
    SamplingParams,
    generator_logprobs_name,
    sample_from_completion,
)

TEMPERED = SamplingParams(8, temperature=0.7)
GREEDY = SamplingParams(8, temperature=0.0)


def completion(basis: LogprobBasis, sampling: SamplingParams = TEMPERED) -> Completion:
    return Completion("p@1#0", np.arange(2), np.full(2, -1.0, np.float32), basis, "stop", sampling, ())


def declared(*bases: str) -> DeclaredBases:
    return DeclaredBases("generator", "acme", frozenset(bases))


@pytest.mark.parametrize(
    ("bases", "basis", "sampling"),
    [
        (("processed",), TEMPERED.basis, TEMPERED),
        (("raw", "processed"), TEMPERED.basis, TEMPERED),
        (("raw",), RAW_BASIS, TEMPERED),
        (("raw",), RAW_BASIS, GREEDY),
        (("processed",), RAW_BASIS, GREEDY),  # greedy logprobs are of the raw distribution
    ],
)
def test_what_was_declared_is_taken(bases: tuple[str, ...], basis: LogprobBasis, sampling: SamplingParams) -> None:
    declared(*bases).check(completion(basis, sampling))


@pytest.mark.parametrize(
    ("bases", "basis"),
    [
        (("processed",), RAW_BASIS),
        (("raw", "processed"), RAW_BASIS),
        (("raw",), TEMPERED.basis),
        (("processed",), LogprobBasis(0.8)),
        (("processed",), LogprobBasis(0.7, top_p=0.9)),
        (("processed",), LogprobBasis(0.7, top_k=20)),
    ],
)
def test_another_basis_is_refused(bases: tuple[str, ...], basis: LogprobBasis) -> None:
    with pytest.raises(PluginError) as caught:
        declared(*bases).check(completion(basis))
    message = str(caught.value)
    assert "generator 'acme' (role 'generator')" in message
    assert f"returned logprobs of basis {basis} for request p@1#0" in message
    assert f"declares {', '.join(sorted(bases))} (GeneratorSpec.bases)" in message
    assert "declare bases=frozenset({'" in message


def test_options_narrow_what_a_record_declares() -> None:
    class Options:
        bases = frozenset({"raw"})

    record = GeneratorSpec(name="acme", factory="a:b", options="a:c")
    settings: dict[str, Any] = {"model": None, "head": "lm", "device": "cpu", "replicas": 1, "ranks": 1}
    settings |= {"trainable": False, "engine": {}, "timeout_s": 1.0}
    for options, expected in ((object(), {"raw", "processed"}), (Options(), {"raw"})):
        backend = BackendPlan("roles.sampler", record, options)  # type: ignore[arg-type]  # attributes are what counts
        bases = declared_bases(RolePlan("sampler", "generator", (backend,), **settings))
        assert bases == DeclaredBases("sampler", "acme", frozenset(expected))


def test_raw_logprobs_of_tempered_samples_have_a_name_of_their_own() -> None:
    """What reads ``generator_logprobs`` makes ratios of them."""
    prompt = Prompt("p", np.array([1, 2]), "?")
    for sampling, basis, name in (
        (TEMPERED, TEMPERED.basis, "generator_logprobs"),
        (TEMPERED, RAW_BASIS, "generator_raw_logprobs"),
        (GREEDY, RAW_BASIS, "generator_logprobs"),
    ):
        made = completion(basis, sampling)
        sample = sample_from_completion("s", "g", prompt, made)
        assert generator_logprobs_name(made) == name
        assert sample.token_data.keys() == {name, "policy_version"}
        assert sample.token_data[name].tolist() == [0, 0, -1, -1]
