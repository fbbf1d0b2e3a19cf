"""The contract of a generator's life: pauses, work while offloaded, what it leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_core.protocols import MemoryPart
from chatlearn_core.types import Completion
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.generator_fixtures import (
    LONG,
    NUM_TOKENS,
    PROMPTS,
    GeneratorFixtures,
    Replica,
    ask,
    idle,
    plain_greedy,
)

PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")


class LifecycleContract(GeneratorFixtures, ConformanceSuite):
    """The part of ``GeneratorConformance`` about pauses, memory and the end."""

    def test_pause_and_resume_may_repeat(self, replica: Replica) -> None:
        """A second ``pause`` or ``resume`` returns and changes nothing; requests wait until ``resume``."""
        generator = replica.generator

        async def interrupt() -> Completion:
            await generator.resume()
            task = asyncio.ensure_future(generator.generate(ask("waits", max_tokens=LONG)))
            await asyncio.sleep(0)
            await generator.pause()
            await generator.pause()
            was_done = task.done()
            await idle()
            assert task.done() == was_done, "the request was answered while paused"
            await generator.resume()
            await generator.resume()
            return await task

        assert replica.run(interrupt()).finish_reason == "length"

    @pytest.mark.parametrize("part", PARTS)
    def test_an_offloaded_generator_refuses_work(
        self, replica: Replica, reference: torch.nn.Module, part: MemoryPart
    ) -> None:
        """While weights or KV cache are offloaded, requests raise a ``BackendError``; each part is onloaded on its own,
        and both calls may repeat.

        A request is served: ``onload`` of one part brings back both, or the generator works with offloaded parts.
        """
        generator = replica.generator
        generator.onload(PARTS)
        for _ in range(2):
            generator.offload(PARTS)
        try:
            for _ in range(2):
                generator.onload({other for other in PARTS if other != part})
            with pytest.raises(BackendError):
                replica.ask(ask("while-offloaded"))
        finally:
            generator.onload({part})
        assert replica.ask(ask("back"))[0].token_ids.tolist() == plain_greedy(reference, PROMPTS[0])
        assert (generator.state, generator.health()) == ("serving", None)

    def test_closing_before_setup_is_allowed(self, model_directory: Path) -> None:
        """``close`` without ``setup`` releases nothing and raises nothing: a runtime closes whatever it built."""
        generator = self.build_generator(model_directory)
        assert generator.state != "serving", "serves before setup"
        generator.close()
        generator.close()
        assert generator.health() is not None, "healthy although closed"

    def test_closing_leaves_nothing(self, replica: Replica, model_directory: Path) -> None:
        """``close`` ends every process and thread that the generator started and removes its temporary files and shared
        memory; later requests raise a ``BackendError`` that names them. Other replicas stay.
        """
        with self.nothing_is_left():
            closed = self.start_replica(model_directory)
            assert len(closed.ask(ask("last"))[0].token_ids) == NUM_TOKENS
            closed.generator.close()
            with pytest.raises(BackendError) as caught:
                closed.ask(ask("too-late"))
            closed.close()
        assert "too-late" in str(caught.value), f"does not name the request: {caught.value}"
        assert replica.ask(ask("other-replica"))[0].finish_reason == "length"
