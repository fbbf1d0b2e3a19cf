"""What only a GPU can show: memory that is really given back, and weights that never leave the GPU."""

from __future__ import annotations

import pytest
import torch

from chatlearn_testing.gpu_handles import shared_by_another_process
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

CACHE_TOKENS = 1 << 20
SLACK_BYTES = 64 << 20


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module")
def directory(model_dir):
    return model_dir()


@pytest.fixture(scope="module")
def engine(start_engine, directory):
    return start_engine(
        directory, device="cuda", attention_backend="triton", max_total_tokens=CACHE_TOKENS, disable_cuda_graph=True
    )


def test_memory_is_given_back_by_part_and_nothing_changes(engine, directory, assert_serves) -> None:
    generator = engine.generator
    assert_serves(engine, directory)
    weights, cache = (generator.live_bytes(part) for part in ("weights", "kv_cache"))
    assert weights >= sum(tensor.nbytes for tensor in read_checkpoint(directory).values())
    used = free_bytes()
    generator.offload({"weights", "kv_cache"})
    asleep = free_bytes()
    assert asleep - used >= weights + cache - SLACK_BYTES
    assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == [0, 0]
    generator.onload({"weights"})
    assert [generator.live_bytes(part) for part in ("weights", "kv_cache")] == [weights, 0]
    assert asleep - free_bytes() < cache // 2 + weights, "the KV cache came back with the weights"
    generator.onload({"kv_cache"})
    assert abs(free_bytes() - used) < SLACK_BYTES
    assert_serves(engine, directory)


def test_weights_are_read_from_another_processs_gpu_memory(engine, directory, tmp_path, assert_serves) -> None:
    other = copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=1), tmp_path / "other")
    loader, version = engine.generator.loader, engine.generator.policy_version + 1
    with shared_by_another_process(other) as handle:

        async def load() -> int:
            await loader.begin(version, manifest_of(read_checkpoint(other), loader.expected_manifest().aliases))
            await loader.load_handles(handle)
            return await loader.finish()

        assert engine.run(load()) == version
    assert_serves(engine, other)


@pytest.mark.parametrize("channel", ["memory_handles", "checkpoint", "process_group"])
def test_weights_from_host_memory_reach_the_gpu_exactly(engine, directory, tmp_path, channel, assert_serves) -> None:
    other = copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=2), tmp_path / "other")
    engine.sync(channel, other)
    assert_serves(engine, other)
