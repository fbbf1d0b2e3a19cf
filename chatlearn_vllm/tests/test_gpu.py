"""What only a GPU can show: memory that sleep really gives back, and weights read from another process's GPU memory."""

from __future__ import annotations

import pytest
import torch

from chatlearn_testing.gpu_handles import shared_by_another_process
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PROMPT = [5, 9, 3]
CACHE_BYTES = 1 << 30
SLACK_BYTES = 64 << 20


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def live(replica):
    return [replica.generator.live_bytes(part) for part in ("weights", "kv_cache")]


@pytest.fixture
def replica(model_dir, make_replica):
    replica = make_replica(
        model_dir(max_length=512), device="cuda", engine={"kv_cache_memory_bytes": CACHE_BYTES, "enforce_eager": True}
    )
    yield replica
    replica.close()


def test_sleep_gives_memory_back_by_part_and_changes_nothing(replica, model_dir):
    before = replica.generate(PROMPT)
    used = free_bytes()

    async def pause():
        await replica.generator.pause()

    async def resume():
        await replica.generator.resume()

    replica.run(pause())
    weights, cache = live(replica)
    assert weights >= sum(tensor.nbytes for tensor in read_checkpoint(model_dir(max_length=512)).values())
    assert cache >= CACHE_BYTES
    replica.generator.offload({"weights", "kv_cache"})
    asleep = free_bytes()
    assert live(replica) == [0, 0]
    assert asleep - used >= CACHE_BYTES - SLACK_BYTES
    replica.generator.onload({"weights"})
    assert live(replica) == [weights, 0]
    assert asleep - free_bytes() < CACHE_BYTES // 2, "the KV cache came back with the weights"
    replica.generator.onload({"kv_cache"})
    assert live(replica) == [weights, cache]
    assert abs(free_bytes() - used) < SLACK_BYTES
    replica.run(resume())
    assert replica.generate(PROMPT).token_ids.tolist() == before.token_ids.tolist()


def test_weights_are_read_from_another_processs_gpu_memory(replica, model_dir, load_model, tmp_path):
    directory = model_dir(max_length=512)
    other = copy_with_weights(directory, perturbed(read_checkpoint(directory), seed=1), tmp_path / "other")
    with shared_by_another_process(other) as handle:

        async def load():
            loader = replica.loader
            manifest = manifest_of(read_checkpoint(other), loader.expected_manifest().aliases)
            await loader.begin(1, manifest)
            await loader.load_handles(handle)
            assert await loader.finish() == 1

        replica.run(load())
    expected = load_model(other).generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
    )
    assert replica.generate(PROMPT).token_ids.tolist() == expected[0, len(PROMPT) :].tolist()
