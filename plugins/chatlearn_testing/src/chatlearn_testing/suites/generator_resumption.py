"""The contract of aborted requests and of those that resume them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.types import Completion, GenerateRequest
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.stress import first_seed, stress_round
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    LONG,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    HalfWay,
    Replica,
    ask,
    assert_completion,
    plain_greedy,
    spanning_stop,
)

RESUMED_AFTER = (0, 1, 5, NUM_TOKENS - 1, NUM_TOKENS)
"""Tokens of the aborted completions that tests resume; under stress, every number of them."""
ATTEMPTS = 30
"""Attempts to abort a request half way; the first is enough for a generator that streams."""


class ResumptionContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about aborts and resumption."""

    def test_abort_keeps_the_tokens_so_far(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A request that is aborted half way returns the tokens sampled until then, once each.

        No token at every attempt: the generator answers an abort with an empty completion.
        """
        half_way = HalfWay(replica, self.record().streaming, 3)

        async def interrupt(name: str) -> Completion:
            task = await half_way.open(ask(name, max_tokens=LONG))
            await replica.generator.abort([name])
            return await task

        for attempt in range(ATTEMPTS):
            name = f"half-way-{attempt}"
            partial = replica.run(interrupt(name))
            count, told = len(partial.token_ids), len(half_way.told)
            assert_completion(reference, ask(name, max_tokens=LONG), partial)
            assert partial.token_ids.tolist() == plain_greedy(reference, PROMPTS[0], count), "no prefix of the whole"
            assert partial.finish_reason == ("length" if count == LONG else "abort")
            assert count >= told, f"on_tokens told of {told} tokens, the aborted completion has {count}"
            if 0 < count < LONG:
                return
            half_way.learn(count)
        pytest.fail(f"whenever they were aborted, {ATTEMPTS} requests had all of their tokens or none")

    def test_abort_ends_exactly_the_requests_named(self, replica: Replica) -> None:
        """``abort`` matches whole ids, not parts of ids or groups, and concerns requests that are open now.

        The suite pauses the replica, so that no request can complete before the abort.
        """
        generator = replica.generator

        async def interrupt() -> tuple[list[Completion], list[Completion]]:
            await generator.pause()
            named, *others = (
                asyncio.ensure_future(generator.generate(request))
                for request in (
                    ask("request-1", max_tokens=LONG),
                    ask("request-10"),
                    ask("request"),
                    ask("another", group_id="request-1"),
                    ask("REQUEST-1"),
                )
            )
            await asyncio.sleep(0)
            await generator.abort(["request-1", "later"])
            first = await asyncio.wait_for(named, self.patience_s)
            await generator.resume()
            later = [generator.generate(ask("later")), generator.generate(ask("request-1"))]
            return [first], list(await asyncio.gather(*others, *later))

        [aborted], rest = replica.run(interrupt())
        assert (aborted.finish_reason, aborted.request_id) == ("abort", "request-1")
        ended = {completion.request_id: completion.finish_reason for completion in rest}
        assert set(ended.values()) == {"length"}, f"other requests were aborted: {ended}"

    def test_abort_of_all_ends_all(self, replica: Replica) -> None:
        """``abort(None)`` ends every open request at once, even while the replica is paused."""
        generator = replica.generator

        async def interrupt() -> list[Completion]:
            await generator.pause()
            tasks = [asyncio.ensure_future(generator.generate(ask(f"open-{i}", max_tokens=LONG))) for i in range(4)]
            await asyncio.sleep(0)
            await generator.abort()
            try:
                return list(await asyncio.wait_for(asyncio.gather(*tasks), self.patience_s / 2))
            finally:
                await generator.resume()

        assert [completion.finish_reason for completion in replica.run(interrupt())] == ["abort"] * 4

    @pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
    def test_a_completion_resumes_after_any_token(
        self, replica: Replica, reference: torch.nn.Module, temperature: float
    ) -> None:
        """An aborted completion of any length is continued to the same whole; what it brings is returned unchanged,
        and ``max_tokens`` bounds the whole.

        Other logprobs than the prior's: they were computed anew, or replaced by those of another basis.
        """
        self._require_resumption(temperature)
        fields: dict[str, Any] = {"temperature": temperature, "seed": first_seed(3)}
        points = range(NUM_TOKENS + 1) if stress_round() else RESUMED_AFTER
        lengths = [max(1, count) for count in points]
        parts = replica.ask(*(ask(f"part-{count}", **fields, max_tokens=count) for count in lengths))
        whole = parts[-1]
        priors = [_cut(part, ask("whole", **fields), count) for part, count in zip(parts, points, strict=True)]
        requests = [ask(f"after-{len(p.token_ids)}", **fields, resume_from=p) for p in priors]
        for request, prior, resumed in zip(requests, priors, replica.ask(*requests), strict=True):
            assert resumed.token_ids.tolist() == whole.token_ids.tolist(), request.id
            assert resumed.finish_reason == "length", request.id
            assert resumed.text == whole.text, f"{request.id}: the text of the whole is {whole.text!r}"
            assert_completion(reference, request, resumed)
            assert_keeps(prior, resumed)

    def test_a_resumed_completion_stops_as_a_whole(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A stop string that begins in the aborted part and ends after it ends the completion."""
        self._require_resumption()
        spanning = spanning_stop(replica)
        request = ask("stops", spanning.prompt, stop=(spanning.text,))
        prior = _cut(spanning.shorter, request, spanning.count - 1)
        request = replace(request, resume_from=prior)
        [resumed] = replica.ask(request)
        assert resumed.token_ids.tolist() == spanning.whole.token_ids[: spanning.count].tolist(), (
            f"stop string {spanning.text!r}, aborted after {prior.text!r}, got {resumed.text!r}"
        )
        assert resumed.finish_reason == "stop"
        assert_completion(reference, request, resumed)

    def test_resumption_with_another_basis_is_refused(self, replica: Replica) -> None:
        """Sampling of another temperature, top-p or top-k cannot continue a completion: its logprobs would belong to
        two distributions. The error names the request.
        """
        self._require_resumption()
        [part] = replica.ask(ask("hot", temperature=1.0, max_tokens=3))
        prior = _cut(part, ask("hot", temperature=1.0), 3)
        others: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5})
        for number, settings in enumerate({"temperature": 0.5} | other for other in others):
            [plain] = replica.ask(ask("plain", max_tokens=1, **settings))
            if plain.basis == prior.basis:
                not_applicable("the generator's logprobs are raw whatever the sampling")
            with pytest.raises(BackendError) as caught:
                replica.ask(ask(f"other-basis-{number}", resume_from=prior, **settings))
            assert f"other-basis-{number}" in str(caught.value), f"does not name the request: {caught.value}"

    def test_equal_ids_get_their_own_completions(self, replica: Replica, reference: torch.nn.Module) -> None:
        """Open requests with equal ids are both answered, each with its own completion."""
        requests = [ask("equal", prompt) for prompt in PROMPTS[:2]]
        for request, completion in zip(requests, replica.ask(*requests), strict=True):
            assert_completion(reference, request, completion)
            assert completion.token_ids.tolist() == plain_greedy(reference, request.prompt_ids.tolist())

    def test_a_cancelled_request_leaves_the_others_alone(self, replica: Replica) -> None:
        """A cancelled ``generate`` call ends as cancelled; other requests, and later ones of its id, complete."""

        async def cancel() -> tuple[bool, list[Completion]]:
            task = asyncio.ensure_future(replica.generator.generate(ask("cancelled", max_tokens=LONG)))
            other = asyncio.ensure_future(replica.generator.generate(ask("other")))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled(), [await other, await replica.generator.generate(ask("cancelled"))]

        cancelled, rest = replica.run(cancel())
        assert cancelled, "the generator swallows the cancellation"
        assert [completion.finish_reason for completion in rest] == ["length"] * 2

    def _require_resumption(self, temperature: float = 0.0) -> None:
        if not self.record().resumable:
            not_applicable("the record does not declare 'resumable'")
        if temperature and not self.record().seeded:
            not_applicable("the record does not declare 'seeded'")


def assert_keeps(prior: Completion, resumed: Completion) -> None:
    """Check that a resumed completion begins with what the aborted one had, bit for bit."""
    count = len(prior.token_ids)
    assert resumed.token_ids[:count].tolist() == prior.token_ids.tolist(), f"{resumed.request_id}: other tokens"
    assert np.array_equal(resumed.logprobs[:count], prior.logprobs), f"{resumed.request_id}: other logprobs"
    if prior.raw_logprobs is not None and resumed.raw_logprobs is not None:
        assert np.array_equal(resumed.raw_logprobs[:count], prior.raw_logprobs), f"{resumed.request_id}: raw logprobs"


def _cut(part: Completion, request: GenerateRequest, count: int) -> Completion:
    """Return the aborted completion that an abort of ``request`` after ``count`` tokens gives."""
    return replace(
        part,
        request_id=request.id,
        token_ids=part.token_ids[:count],
        logprobs=part.logprobs[:count],
        raw_logprobs=None if part.raw_logprobs is None else part.raw_logprobs[:count],
        version_spans=part.version_spans if count else (),
        text=part.text if count else "",
        finish_reason="abort",
        sampling=request.sampling,
    )
