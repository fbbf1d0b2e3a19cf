"""Memory of a real engine on a CPU: offloaded parts are gone, come back as they were, and are measured as they are."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chatlearn_core.exceptions import BackendError
from chatlearn_testing.model_directory import copy_with_weights, perturbed, read_checkpoint
from chatlearn_vllm.conformance import ENGINE_ARGUMENTS

pytestmark = pytest.mark.engine

PROMPT = [5, 9, 3]
CACHE_BYTES = ENGINE_ARGUMENTS["kv_cache_memory_bytes"]
BOTH = {"weights", "kv_cache"}


def live(replica):
    return [replica.generator.live_bytes(part) for part in ("weights", "kv_cache")]


def resident_bytes():
    """Of this process, as the kernel counts."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def answer(replica):
    completion = replica.generate(PROMPT)
    return completion.token_ids.tolist(), completion.logprobs.tolist()


class TestTwoEnginesInOneProcess:
    """A mixture of experts: its experts are packed parameters, its other layers packed by oneDNN."""

    @pytest.fixture(scope="class")
    @classmethod
    def replicas(cls, model_dir, make_replica):
        replicas = [make_replica(model_dir("qwen3_moe")) for _ in range(2)]
        yield replicas
        for replica in replicas:
            replica.close()

    def test_parts_are_gone_and_come_back_bit_by_bit(self, replicas, model_dir):
        replica, bystander = replicas
        before = answer(replica)
        weights, cache = live(replica)
        assert weights >= sum(tensor.nbytes for tensor in read_checkpoint(model_dir("qwen3_moe")).values())
        assert cache == CACHE_BYTES
        occupied = resident_bytes()
        replica.generator.offload(BOTH)
        assert live(replica) == [0, 0]
        assert occupied - resident_bytes() > 0.75 * CACHE_BYTES
        assert answer(bystander) == before, "what one engine gives back belongs to no other"
        replica.generator.onload({"weights"})
        assert live(replica) == [weights, 0]
        replica.generator.onload({"kv_cache"})
        assert live(replica) == [weights, cache]
        assert answer(replica) == before
        assert replica.generator.live_bytes("optimizer") == 0

    def test_the_cache_goes_alone(self, replicas):
        replica, _ = replicas
        before, (weights, cache) = answer(replica), live(replica)
        replica.generator.offload({"kv_cache"})
        assert live(replica) == [weights, 0]
        replica.generator.onload({"kv_cache"})
        assert live(replica) == [weights, cache]
        assert answer(replica) == before

    def test_the_weights_follow_the_cache(self, replicas):
        replica, _ = replicas
        before, (weights, cache) = answer(replica), live(replica)
        replica.generator.offload({"kv_cache"})
        replica.generator.offload({"weights"})
        assert live(replica) == [0, 0]
        replica.generator.onload(BOTH)
        assert live(replica) == [weights, cache]
        assert answer(replica) == before

    def test_weights_that_came_by_a_sync_while_the_cache_was_away_are_kept(self, replicas, model_dir):
        replica, bystander = replicas
        other = perturbed(read_checkpoint(model_dir("qwen3_moe")), seed=1)
        bystander.sync(other)
        expected, weights = answer(bystander), live(replica)[0]
        replica.generator.offload(BOTH)
        replica.generator.onload({"weights"})
        replica.sync(other)
        assert live(replica) == [weights, 0]
        replica.generator.offload({"weights"})
        replica.generator.onload(BOTH)
        assert answer(replica) == expected


def test_dropped_weights_come_with_the_next_sync(model_dir, make_replica, load_model, tmp_path):
    replica = make_replica(model_dir(), sleep_level=2)
    other = perturbed(read_checkpoint(model_dir()), seed=1)
    try:
        weights, cache = live(replica)
        replica.generator.offload(BOTH)
        assert live(replica) == [0, 0]
        replica.generator.onload(BOTH)
        assert live(replica) == [weights, cache]
        with pytest.raises(BackendError, match="sync weights before generating"):
            replica.generate(PROMPT)
        replica.sync(other)
        expected = load_model(copy_with_weights(model_dir(), other, tmp_path / "other")).generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
        )
        assert replica.generate(PROMPT).token_ids.tolist() == expected[0, len(PROMPT) :].tolist()
    finally:
        replica.close()


def test_bfloat16_in_a_process_of_its_own(model_dir, make_replica):
    """Where the CPU has AMX, nothing in that process has asked for it before vLLM does."""
    replica = make_replica(model_dir(), host="child", dtype="bfloat16")
    try:
        before, (weights, cache) = answer(replica), live(replica)
        assert weights >= sum(tensor.numel() * 2 for tensor in read_checkpoint(model_dir()).values())
        replica.generator.offload(BOTH)
        assert live(replica) == [0, 0]
        replica.generator.onload(BOTH)
        assert live(replica) == [weights, cache]
        assert answer(replica) == before
    finally:
        replica.close()
    assert live(replica) == [0, 0], "its process is gone"


@pytest.mark.parametrize(
    ("on_cpu", "facts", "reason"),
    [
        (True, {}, None),
        (True, {"quant_config": object(), "quantization": "fp8"}, "quantised weights (fp8)"),
        (True, {"mode": 3}, "set engine.enforce_eager to true"),
        (False, {"enable_sleep_mode": True, "quant_config": object(), "mode": 3}, None),
        (False, {}, "engine.enable_sleep_mode is false"),
        (False, {"enable_sleep_mode": True, "sleep_mode_backend": "other"}, "sleep_mode_backend is 'other'"),
    ],
)
def test_an_engine_that_cannot_give_memory_back_says_why(on_cpu, facts, reason):
    from chatlearn_vllm.engine_side.engine import offload_problem

    model = {"quantization": None, "enable_sleep_mode": False, "sleep_mode_backend": "cumem"}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**{name: facts.get(name, value) for name, value in model.items()}),
        quant_config=facts.get("quant_config"),
        compilation_config=SimpleNamespace(mode=facts.get("mode", 0)),
    )
    found = offload_problem(config, on_cpu=on_cpu)
    assert (found is None) if reason is None else (reason in found)
