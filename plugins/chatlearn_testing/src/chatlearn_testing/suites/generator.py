"""The contract of a generator: completions, logprobs and finish reasons are those of the stated distribution."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.executor.logprob_bases import DeclaredBases
from chatlearn_core.plugins.compatibility import bases_of, returns_kept_ids
from chatlearn_core.plugins.records import Kind
from chatlearn_core.protocols import Generator
from chatlearn_core.types import RAW_BASIS
from chatlearn_core.types.completion import KEPT_IDS
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.fakes.sampling import basis_logprobs
from chatlearn_testing.stress import seeds
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_classifier import ClassifierContract
from chatlearn_testing.suites.generator_fixtures import (
    FEW_TOKENS,
    MODEL_LENGTH,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    ask_score,
    assert_completion,
    plain_greedy,
    plain_logits,
)
from chatlearn_testing.suites.generator_interruption import InterruptionContract
from chatlearn_testing.suites.generator_lifecycle import LifecycleContract
from chatlearn_testing.suites.generator_promises import PromisesContract
from chatlearn_testing.suites.generator_resumption import ResumptionContract
from chatlearn_testing.suites.generator_sampling import SamplingContract
from chatlearn_testing.suites.generator_stopping import StoppingContract
from chatlearn_testing.suites.generator_versions import VersionsContract
from chatlearn_testing.suites.generator_weights import GeneratorWeightsContract

PROCESSED: dict[str, Any] = {"temperature": 0.7, "top_k": 11, "top_p": 0.85}
NUM_DRAWS = 400
SIGMAS = 5.0
"""Accepted deviation of a sample mean, standard errors: a correct sampler exceeds it once in two million seeds."""


class GeneratorConformance(
    SamplingContract,
    StoppingContract,
    GeneratorWeightsContract,
    VersionsContract,
    InterruptionContract,
    ResumptionContract,
    PromisesContract,
    LifecycleContract,
    ClassifierContract,
    GeneratorFixtures,
    ConformanceSuite,
):
    """Contract tests that every generator must pass.

    A subclass sets ``backend``, a fixture ``model_directory`` and ``load_reference``.
    """

    kind: ClassVar[Kind] = "generator"

    def test_is_a_generator(self, replica: Replica) -> None:
        """The object has every method of ``Generator``; after ``setup`` it is serving, healthy and at version 0."""
        generator = replica.generator
        assert isinstance(generator, Generator), "a method of chatlearn_core.protocols.Generator is missing"
        assert (generator.state, generator.policy_version, generator.health()) == ("serving", 0, None)

    def test_greedy_equals_a_plain_forward(self, replica: Replica, reference: torch.nn.Module) -> None:
        """At temperature 0 every token is the most likely one, however many requests run together.

        Correct for one request and wrong for several: padding or the KV cache of other requests leaks.
        """
        requests = [ask(f"greedy-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            assert completion.token_ids.tolist() == plain_greedy(reference, request.prompt_ids.tolist()), request.id
            assert completion.finish_reason == "length"
            assert completion.basis == RAW_BASIS, "a greedy completion's logprobs are of the raw distribution"
            assert_completion(reference, request, completion)

    @pytest.mark.parametrize(
        "sampling",
        [{"temperature": 1.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, PROCESSED],
        ids=["plain", "temperature", "top_k", "top_p", "all"],
    )
    def test_logprobs_are_of_the_stated_basis(
        self, replica: Replica, reference: torch.nn.Module, sampling: dict[str, Any]
    ) -> None:
        """``logprobs`` belong to the distribution that ``basis`` names: raw, or processed as requested.

        Correct at temperature 1 and wrong otherwise: raw logprobs are labelled as processed, or the reverse. The
        importance ratio would then compare two different distributions. A run relies on the bases that the record (or
        an attribute ``bases`` of the options) declares, and stops at a completion with another basis.
        """
        settings = {"temperature": 1.0} | sampling
        requests = [ask(f"basis-{i}", prompt, seed=i, **settings) for i, prompt in enumerate(PROMPTS)]
        declared = DeclaredBases("generator", self.record().name, bases_of(self.record(), self.make_options()))
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            assert_completion(reference, request, completion)
            expected = declared.expected(request.sampling)
            assert completion.basis == expected, (
                f"states the basis {completion.basis}, expected {expected}: the record declares "
                f"{', '.join(sorted(declared.bases))}"
            )

    def test_samples_from_the_stated_distribution(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Many draws have the mean logprob of the processed distribution, and none breaks top-k or top-p."""
        requests = [ask(f"draw-{seed}", max_tokens=1, seed=seed, **PROCESSED) for seed in seeds(NUM_DRAWS)]
        drawn = torch.tensor([int(c.token_ids[0]) for c in replica.ask(*requests)])
        distribution = basis_logprobs(plain_logits(reference, PROMPTS[0], [0]), requests[0].sampling.basis)[0]
        logprobs = distribution[drawn]
        assert bool(torch.isfinite(logprobs).all()), "drew a token that top-k and top-p had cut"
        kept = distribution[torch.isfinite(distribution)]
        mean = float((kept.exp() * kept).sum())
        spread = math.sqrt(max(0.0, float((kept.exp() * kept.square()).sum()) - mean**2))
        assert abs(float(logprobs.mean()) - mean) <= SIGMAS * spread / math.sqrt(len(drawn)) + 1e-6, (
            f"mean logprob {float(logprobs.mean())} of {len(drawn)} draws, the distribution's is {mean}"
        )

    def test_kept_ids_are_what_a_token_was_sampled_from(self, replica: Replica, reference: torch.nn.Module) -> None:
        """``kept_ids``: with ``max_kept_ids``, ``token_data["kept_ids"]`` has for each token the ids that top-k and
        top-p kept, -1 after the last.

        Too many ids: the truncation was not applied to what is returned. Ids of another position: rows are shifted.
        """
        if not returns_kept_ids(self.record(), self.make_options()):
            not_applicable("the record does not declare 'kept_ids', so no run asks for them")
        most = PROCESSED["top_k"] + 2
        requests = [ask(f"kept-{i}", p, seed=i, max_kept_ids=most, **PROCESSED) for i, p in enumerate(PROMPTS)]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            assert_completion(reference, request, completion)
            kept = np.asarray(completion.token_data[KEPT_IDS])
            assert kept.shape == (len(completion.token_ids), most), request.id
            logits = plain_logits(reference, request.prompt_ids.tolist(), completion.token_ids.tolist())
            allowed = torch.isfinite(basis_logprobs(logits, request.sampling.basis))
            for ids, row in zip(kept.tolist(), allowed, strict=True):
                found = [token for token in ids if token >= 0]
                assert ids == found + [-1] * (most - len(found)), "an id stands after a -1"
                assert sorted(found) == row.nonzero().flatten().tolist()

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
    def test_given_tokens_are_scored(self, replica: Replica, reference: torch.nn.Module, temperature: float) -> None:
        """``scores``: a request with ``forced_ids`` returns these tokens, their logprobs under the stated basis, and
        the reason ``stop``; requests sampled in the same batch are unaffected.

        Other tokens: the request was sampled instead of scored. Correct tokens with a neighbour's logprobs: the
        logprobs are shifted by one.
        """
        if not self.record().scores:
            not_applicable("the record does not declare 'scores'")
        given = [tuple((token * 3 + 1) % FEW_TOKENS for token in (*prompt, *PROMPTS[0])) for prompt in PROMPTS]
        asked = [ask_score(f"score-{i}", prompt, given[i], temperature=temperature) for i, prompt in enumerate(PROMPTS)]
        *scored, sampled = replica.ask(*asked, ask("beside"))
        for request, completion in zip(asked, scored, strict=True):
            assert request.forced_ids is not None
            assert completion.token_ids.tolist() == request.forced_ids.tolist(), "these are not the given tokens"
            assert completion.finish_reason == "stop"
            assert_completion(reference, request, completion)
        assert sampled.token_ids.tolist() == plain_greedy(reference, PROMPTS[0]), "scoring changed what was sampled"

    def test_tokens_are_scored_or_refused(self, replica: Replica) -> None:
        """A request that cannot be scored raises a ``BackendError`` that names it.

        Without ``scores`` in the record this is every request with ``forced_ids``; with it, requests with top-p or
        top-k, which may remove a given token and leave it without a logprob. Sampling instead would return other
        tokens in place of the given ones.
        """
        settings = {"temperature": 1.0} | ({"top_p": 0.8} if self.record().scores else {})
        with pytest.raises(BackendError) as caught:
            replica.ask(ask_score("no-score", PROMPTS[0], (3, 1), **settings))
        assert "no-score" in str(caught.value), f"does not name the request: {caught.value}"

    def test_seeds_decide(self, replica: Replica) -> None:
        """Equal seeds give equal tokens in any batch, and different seeds give different tokens.

        Tokens that depend on the batch: random numbers come from a shared stream instead of from (seed, position).
        """
        if not self.record().seeded:
            not_applicable("the record does not declare 'seeded'")
        crowd = [ask(f"seed-{i}", PROMPTS[i % 4], temperature=1.0, seed=i // 2) for i in range(12)]
        together = [completion.token_ids.tolist() for completion in replica.ask(*crowd)]
        alone = [replica.ask(request)[0].token_ids.tolist() for request in crowd[:4]]
        assert alone == together[:4], "a request's tokens depend on what it is batched with"
        others = {
            tuple(replica.ask(ask("other", temperature=1.0, seed=seed))[0].token_ids.tolist()) for seed in range(8)
        }
        assert len(others) > 1, "eight seeds gave the same tokens: the seed is ignored"

    def test_stop_tokens_end_a_completion(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A completion ends with the stop token, which is part of it; the reason is ``stop``."""
        expected = plain_greedy(reference, PROMPTS[0])
        stop = expected[NUM_TOKENS // 2]
        request = ask("stop-token", stop_token_ids=(stop,))
        [completion] = replica.ask(request)
        assert completion.token_ids.tolist() == expected[: expected.index(stop) + 1]
        assert completion.finish_reason == "stop"
        assert_completion(reference, request, completion)

    def test_stop_strings_end_a_completion(self, replica: Replica, reference: torch.nn.Module) -> None:
        """The completion includes the stop string, and no token follows the one that completes it."""
        prompt, whole = next(
            (
                (prompt, c)
                for prompt in PROMPTS
                if any(map(str.isalnum, (c := replica.ask(ask("text", prompt))[0]).text))
            ),
            (PROMPTS[0], replica.ask(ask("text"))[0]),
        )
        letters = [character for character in whole.text if character.isascii() and character.isalnum()]
        assert letters, f"no completion of the suite's prompts has a letter in its text: {whole.text!r}"
        stop = letters[len(letters) // 2]
        request = ask("stop-string", prompt, stop=(stop,))
        [completion] = replica.ask(request)
        count = len(completion.token_ids)
        assert completion.token_ids.tolist() == whole.token_ids.tolist()[:count]
        assert stop in completion.text, f"the completion {completion.text!r} does not hold its stop string {stop!r}"
        assert completion.finish_reason == "stop"
        if count > 1:
            [shorter] = replica.ask(ask("before", prompt, max_tokens=count - 1))
            assert stop not in shorter.text, f"went on after {stop!r} had appeared"
        assert_completion(reference, request, completion)

    def test_max_tokens_bounds_a_completion(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A completion that meets no stop condition has exactly ``max_tokens`` tokens and the reason ``length``."""
        requests = [ask(f"length-{count}", max_tokens=count) for count in (1, 2, 7)]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            assert len(completion.token_ids) == request.sampling.max_tokens
            assert completion.finish_reason == "length"
            assert_completion(reference, request, completion)

    @pytest.mark.parametrize(
        "prompt",
        [(), (1,) * (MODEL_LENGTH + 1), (5, -1), (5, 10**9)],
        ids=["empty", "too long", "negative", "outside the vocabulary"],
    )
    def test_errors_name_the_request(self, replica: Replica, prompt: tuple[int, ...]) -> None:
        """An invalid prompt raises a ``BackendError`` with the request's id, and later requests succeed."""
        with pytest.raises(BackendError) as caught:
            replica.ask(ask("the-bad-one", prompt))
        assert "the-bad-one" in str(caught.value), f"does not name the request: {caught.value}"
        assert len(replica.ask(ask("after"))[0].token_ids) == NUM_TOKENS
