"""Memory of a real engine on a CPU: offloaded parts are gone, come back as they were, and are measured as they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatlearn_sglang.engine_side import memory
from chatlearn_testing.model_directory import copy_with_weights, perturbed, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import PROMPTS, ask

LAYERS, HEADS, HEAD_WIDTH, CACHE_TOKENS = 2, 2, 32, 100_000
"""Of the tiny model's cache; enough tokens that it is most of what the process occupies."""
BOTH = {"weights", "kv_cache"}


@pytest.fixture(scope="module")
def engine(model_dir: Callable[..., Path], start_engine: Callable[..., Any]) -> Any:
    return start_engine(model_dir(hidden=128), max_total_tokens=CACHE_TOKENS)


def live(engine: Any) -> list[int]:
    return [engine.generator.live_bytes(part) for part in ("weights", "kv_cache")]


def resident_bytes(engine: Any) -> int:
    """Of the scheduler's process, as the kernel counts."""
    [scheduler] = [pid for title, pid in engine.processes().items() if "scheduler" in title]
    return int(Path(f"/proc/{scheduler}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answers(engine: Any) -> list[Any]:
    """One after the other, each alone: the same numbers are added in the same order every time."""
    completions = [engine.ask(ask(f"a-{i}", prompt))[0] for i, prompt in enumerate(PROMPTS)]
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in completions]


def forget(engine: Any) -> None:
    """Empty the prefix cache."""
    engine.generator.offload({"kv_cache"})
    engine.generator.onload({"kv_cache"})


@pytest.mark.engine
class TestEngine:
    def test_released_parts_are_restored_bit_exactly(self, engine: Any) -> None:
        forget(engine)
        before, (weights, cache) = answers(engine), live(engine)
        assert weights >= sum(tensor.nbytes for tensor in read_checkpoint(engine.directory).values())
        assert cache >= CACHE_TOKENS * LAYERS * 2 * HEADS * HEAD_WIDTH * 4
        occupied = resident_bytes(engine)
        engine.generator.offload(BOTH)
        assert live(engine) == [0, 0]
        assert occupied - resident_bytes(engine) > 0.75 * cache
        engine.generator.onload({"weights"})
        assert live(engine) == [weights, 0]
        engine.generator.onload({"kv_cache"})
        assert live(engine) == [weights, cache]
        assert answers(engine) == before
        assert engine.generator.live_bytes("optimizer") == 0

    def test_weights_synced_while_the_cache_is_released_are_kept(
        self, engine: Any, tmp_path: Path, assert_serves: Callable[..., None]
    ) -> None:
        weights, cache = live(engine)
        other = copy_with_weights(
            engine.directory, perturbed(read_checkpoint(engine.directory), seed=1), tmp_path / "o"
        )
        engine.generator.offload(BOTH)
        engine.generator.onload({"weights"})
        engine.sync("tensors", other)
        assert live(engine) == [weights, 0]
        engine.generator.offload({"weights"})
        engine.generator.onload(BOTH)
        assert live(engine) == [weights, cache]
        assert_serves(engine, other)

    def test_paused_requests_continue_where_they_stopped(self, engine: Any) -> None:
        request = ask("long", max_tokens=60)
        [expected] = engine.ask(request)

        async def move() -> Any:
            begun = asyncio.Event()
            task = asyncio.ensure_future(engine.generator.generate(request, lambda *_: begun.set()))
            await begun.wait()
            await engine.generator.pause()
            engine.generator.offload(BOTH)
            engine.generator.onload(BOTH)
            await engine.generator.resume()
            return await task

        assert engine.run(move()).token_ids.tolist() == expected.token_ids.tolist()


class Pool:
    """A pool with a pool inside, as SGLang's for mixed attention."""

    def __init__(self, inner: Any = None) -> None:
        self.buffers = [torch.zeros(1000), torch.zeros(500)]
        self.data_ptrs = torch.tensor([b.data_ptr() for b in self.buffers], dtype=torch.uint64)
        self.inner = inner


Pool.__module__ = "sglang.srt.mem_cache.memory_pool"


@pytest.fixture
def scheduler() -> Iterator[Any]:
    pool = Pool(Pool())
    yield SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(10, 10))),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
    )
    memory._emptied.clear()


def test_addresses_that_a_pool_keeps_follow_its_buffers(scheduler: Any) -> None:
    updater = SimpleNamespace(scheduler=scheduler)
    request = SimpleNamespace(tags=["kv_cache"])
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    assert memory.live_bytes(scheduler, "kv_cache") == 2 * 1500 * 4
    memory.empty(None, updater, request)
    assert memory.live_bytes(scheduler, "kv_cache") == 0
    assert memory.live_bytes(scheduler, "weights") == 110 * 4
    in_the_way = [torch.empty(1000) for _ in range(4)]
    memory.fill(updater, request)
    assert memory.live_bytes(scheduler, "kv_cache") == 2 * 1500 * 4
    for each in (pool, pool.inner):
        assert each.data_ptrs.tolist() == [buffer.data_ptr() for buffer in each.buffers]
    assert len(in_the_way) == 4
