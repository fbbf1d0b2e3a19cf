"""Two tensor-parallel ranks and a mixture of experts: what one rank of a dense model cannot show."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from chatlearn_core.exceptions import BackendError
from chatlearn_testing.model_directory import copy_with_weights, perturbed, read_checkpoint
from chatlearn_testing.suites.generator_fixtures import ask

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def directory(model_dir) -> Path:
    return model_dir("qwen3_moe")


@pytest.fixture(scope="module")
def engine(start_engine, directory):
    return start_engine(directory, tp_size=2)


@pytest.mark.parametrize("channel", ["memory_handles", "checkpoint", "process_group"])
def test_experts_and_shards_are_reloaded_exactly(engine, directory, tmp_path, channel, assert_serves) -> None:
    assert engine.generator.loader.num_group_ranks == 2
    assert_serves(engine, directory)
    other = copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=2), tmp_path / "other")
    engine.sync(channel, other)
    assert_serves(engine, other)
    engine.sync(channel, directory)
    assert_serves(engine, directory)


def test_the_memory_of_all_ranks_is_given_back_and_summed(engine, directory, assert_serves) -> None:
    generator = engine.generator
    before = [generator.live_bytes(part) for part in ("weights", "kv_cache")]
    assert before[0] >= sum(tensor.nbytes for tensor in read_checkpoint(directory).values())
    generator.offload({"weights", "kv_cache"})
    assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == [0, 0]
    generator.onload({"weights", "kv_cache"})
    assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == before
    assert_serves(engine, directory)


def test_a_rank_that_is_killed_while_generating_takes_the_replica_with_it(engine) -> None:
    """The last test of this engine: every request fails, the engine's own words are kept, no process is left behind."""
    generator = engine.generator
    processes = engine.processes()
    [rank] = [pid for title, pid in processes.items() if "scheduler" in title and "TP1" in title]

    async def interrupted() -> list[BaseException]:
        begun = asyncio.Event()
        requests = [ask(f"open-{i}", max_tokens=100) for i in range(3)]
        tasks = [asyncio.ensure_future(generator.generate(r, lambda start, tokens: begun.set())) for r in requests]
        await begun.wait()
        os.kill(rank, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    for number, error in enumerate(engine.run(interrupted())):
        assert isinstance(error, BackendError)
        assert f"request 'open-{number}' failed" in str(error)
    assert generator.state == "dead"
    generator.close()
    for pid in processes.values():
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
