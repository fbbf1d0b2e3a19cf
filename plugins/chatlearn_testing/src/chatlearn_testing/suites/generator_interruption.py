"""The contract of a generator under interruption: abort, resume, pause, timeout, offload, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from chatlearn_core.exceptions import BackendError, BackendTimeoutError
from chatlearn_core.protocols import Generator, MeasuresMemory
from chatlearn_core.types import Completion, GenerateRequest
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    LONG,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    assert_completion,
    idle,
    plain_greedy,
)

ATTEMPTS = 5
"""Attempts to abort a request before it is complete: on a busy machine the engine may finish it first."""


class InterruptionContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about interruption."""

    def test_streaming_tells_a_prefix(self, replica: Replica) -> None:
        """The calls of ``on_tokens`` together give the completion, in order, without gaps or repeats."""
        if not self.record().streaming:
            not_applicable("the record does not declare 'streaming'")
        told: list[int] = []

        def on_tokens(start: int, token_ids: list[int]) -> None:
            assert start == len(told), f"on_tokens got position {start} after {len(told)} tokens"
            told.extend(token_ids)

        completion = replica.run(replica.generator.generate(ask("stream"), on_tokens))
        assert told == completion.token_ids.tolist()

    def test_abort_returns_what_was_sampled(self, replica: Replica, reference: torch.nn.Module) -> None:
        """After ``abort``, ``generate`` returns the tokens so far with reason ``abort``; other requests continue and
        unknown ids are ignored.
        """

        async def interrupt() -> tuple[Completion, Completion]:
            other = asyncio.ensure_future(replica.generator.generate(ask("bystander")))
            partial = await _interrupted(replica.generator, ask("aborted", max_tokens=LONG), self.record().streaming)
            return partial, await other

        partial, other = replica.run(interrupt())
        request = ask("aborted", max_tokens=LONG)
        assert partial.finish_reason in ("abort", "length"), partial.finish_reason
        expected = plain_greedy(reference, PROMPTS[0], len(partial.token_ids))
        assert partial.token_ids.tolist() == expected, "the partial completion is no prefix of the whole"
        if self.record().streaming:
            assert 0 < len(partial.token_ids) < LONG, (
                f"{len(partial.token_ids)} tokens were kept of the aborted request"
            )
        assert_completion(reference, request, partial)
        assert other.finish_reason == "length", "a request that was not named was aborted"

    def test_abort_without_names_ends_all(self, replica: Replica) -> None:
        """``abort(None)`` makes every open request return."""

        async def interrupt() -> list[Completion]:
            tasks = [
                asyncio.ensure_future(replica.generator.generate(ask(f"all-{i}", prompt, max_tokens=LONG)))
                for i, prompt in enumerate(PROMPTS)
            ]
            await asyncio.sleep(0)
            await replica.generator.abort()
            return list(await asyncio.gather(*tasks))

        assert {completion.finish_reason for completion in replica.run(interrupt())} <= {"abort", "length"}

    @pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
    def test_resume_continues_an_aborted_completion(
        self, replica: Replica, reference: torch.nn.Module, temperature: float
    ) -> None:
        """A completion that was aborted and resumed equals one without interruption: tokens, logprobs and spans.
        ``max_tokens`` limits both parts together.

        Different sampled tokens: random numbers start again instead of being keyed by the token's position.
        """
        if not self.record().resumable:
            not_applicable("the record does not declare 'resumable'")
        if temperature and not self.record().seeded:
            not_applicable("the record does not declare 'seeded'")
        fields: dict[str, Any] = {"max_tokens": LONG, "temperature": temperature, "seed": 3}
        [whole] = replica.ask(ask("whole", **fields))
        partial = replica.run(_interrupted(replica.generator, ask("part", **fields), self.record().streaming))
        request = ask("rest", **fields, resume_from=partial)
        [resumed] = replica.ask(request)
        assert resumed.token_ids.tolist() == whole.token_ids.tolist()
        assert resumed.finish_reason == whole.finish_reason
        assert_completion(reference, request, resumed)

    def test_a_paused_request_goes_on_later(self, replica: Replica, reference: torch.nn.Module) -> None:
        """A paused replica samples nothing until ``resume``, and the pause does not change the completion."""

        async def interrupt() -> Completion:
            sampled: list[int] = []
            begun = asyncio.Event()

            def on_tokens(start: int, token_ids: list[int]) -> None:
                sampled.extend(token_ids)
                begun.set()

            callback = on_tokens if self.record().streaming else None
            task = asyncio.ensure_future(replica.generator.generate(ask("kept", max_tokens=LONG), callback))
            await (begun.wait() if callback else asyncio.sleep(0))
            await replica.generator.pause()
            count, was_done = len(sampled), task.done()
            await idle()
            assert task.done() == was_done, "the request was answered while paused"
            assert len(sampled) == count, f"{len(sampled) - count} tokens were sampled while paused"
            await replica.generator.resume()
            return await task

        completion = replica.run(interrupt())
        assert completion.token_ids.tolist() == plain_greedy(reference, PROMPTS[0], LONG)
        assert_completion(reference, ask("kept", max_tokens=LONG), completion)

    def test_what_comes_while_paused_waits(self, replica: Replica) -> None:
        """A request submitted during a pause completes after ``resume``, or returns at once if it is aborted."""

        async def interrupt() -> tuple[Completion, Completion]:
            await replica.generator.pause()
            late = asyncio.ensure_future(replica.generator.generate(ask("late")))
            cut = asyncio.ensure_future(replica.generator.generate(ask("cut", max_tokens=LONG)))
            await idle()
            assert not late.done(), "a request was answered while paused"
            await replica.generator.abort(["cut"])
            cut_short = await cut
            await replica.generator.resume()
            return cut_short, await late

        cut, late = replica.run(interrupt())
        assert (cut.finish_reason, len(cut.token_ids)) == ("abort", 0)
        assert late.finish_reason == "length"

    def test_a_timeout_names_the_request(self, replica: Replica) -> None:
        """``request.timeout_s`` ends a request with a ``BackendTimeoutError``, and the replica keeps serving.

        The suite pauses the replica, so that the request cannot complete.
        """

        async def wait() -> None:
            await replica.generator.pause()
            try:
                await replica.generator.generate(ask("too-slow", timeout_s=0.05))
            finally:
                await replica.generator.resume()

        with pytest.raises(BackendTimeoutError) as caught:
            replica.run(wait())
        assert "too-slow" in str(caught.value), f"does not name the request: {caught.value}"
        assert replica.ask(ask("in-time"))[0].finish_reason == "length"

    def test_offload_and_onload_change_nothing(self, replica: Replica) -> None:
        """After offload and onload the weights are unchanged and the KV cache is empty; unknown parts are ignored."""
        [before] = replica.ask(ask("before", temperature=1.0))

        async def move() -> None:
            await replica.generator.pause()
            replica.generator.offload({"weights", "kv_cache", "optimizer"})
            replica.generator.onload({"weights", "kv_cache", "optimizer"})
            await replica.generator.resume()

        replica.run(move())
        [after] = replica.ask(ask("after", temperature=1.0))
        if self.record().seeded:
            assert after.token_ids.tolist() == before.token_ids.tolist()
        assert replica.generator.state == "serving"

    def test_an_offloaded_generator_occupies_nothing(self, replica: Replica) -> None:
        """Offloaded weights and KV cache have 0 live bytes, also after a generation; onloaded weights have as many as
        before.

        If offloaded memory is not really free, another role on the same device runs out of memory.
        """
        generator = replica.generator
        if not isinstance(generator, MeasuresMemory):
            not_applicable("the generator has no live_bytes, so the suite cannot measure its memory")
        replica.ask(ask("before"))
        weights = generator.live_bytes("weights")
        assert weights > 0, "the weights of a generator that serves occupy memory"
        generator.offload({"weights", "kv_cache"})
        assert [generator.live_bytes("weights"), generator.live_bytes("kv_cache")] == [0, 0]
        generator.onload({"weights"})
        assert [generator.live_bytes("weights"), generator.live_bytes("kv_cache")] == [weights, 0]
        generator.onload({"kv_cache"})
        assert replica.ask(ask("after"))[0].finish_reason == "length"

    def test_closing_ends_open_requests(self, start: Callable[[], Replica]) -> None:
        """``close`` is idempotent; open and later requests raise a ``BackendError``.

        The suite pauses the replica before it submits the second request, because a fast engine may complete a request
        before the close; such a request must return its completion.
        """
        replica = start()

        async def close() -> list[Completion | BaseException]:
            waiting = [asyncio.ensure_future(replica.generator.generate(ask("begun", max_tokens=LONG)))]
            await asyncio.sleep(0)
            await replica.generator.pause()
            waiting.append(asyncio.ensure_future(replica.generator.generate(ask("held", max_tokens=LONG))))
            await asyncio.sleep(0)
            replica.generator.close()
            replica.generator.close()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            with pytest.raises(BackendError):
                await replica.generator.generate(ask("late"))
            return outcomes

        begun, *held = replica.run(close())
        assert all(isinstance(outcome, BackendError) for outcome in held), f"close ended a request with {held[0]!r}"
        if isinstance(begun, BaseException):
            assert isinstance(begun, BackendError), f"close ended a request with {begun!r}"
        else:
            assert (begun.finish_reason, len(begun.token_ids)) == ("length", LONG), f"closing gave {begun}"
        assert replica.generator.health() is not None, "healthy although closed"


async def _interrupted(generator: Generator, request: GenerateRequest, streaming: bool) -> Completion:
    """Submit ``request``, abort it once it has a few tokens (with ``streaming``) or at once, return the completion.

    A request that completes before the abort is submitted again, up to ``ATTEMPTS`` times in all.
    """
    for _ in range(ATTEMPTS):
        completion = await _aborted(generator, request, streaming)
        if completion.finish_reason == "abort":
            break
    return completion


async def _aborted(generator: Generator, request: GenerateRequest, streaming: bool) -> Completion:
    begun = asyncio.Event()

    def on_tokens(start: int, token_ids: list[int]) -> None:
        if start + len(token_ids) >= 3:
            begun.set()

    task = asyncio.ensure_future(generator.generate(request, on_tokens if streaming else None))
    if streaming:
        waiting = asyncio.ensure_future(begun.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    else:
        await asyncio.sleep(0)
    await generator.abort({request.id, "a request that was never made"})
    return await task
