from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_core.types import WeightShard
from chatlearn_sync.delta import DeltaSender
from chatlearn_sync.delta_receiver import DeltaReceiver
from chatlearn_sync.options import DeltaOptions


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(400, 8, generator=generator),
        "layer.weight": torch.randn(64, 64, generator=generator).to(torch.bfloat16),
        "frozen.weight": torch.randn(64, generator=generator),
    }


def stepped(tensors, share=0.01, seed=1):
    """Another version: a share of the elements of every tensor but the frozen one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor
        if name.startswith("frozen")
        else torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor * 2 + 1, tensor)
        for name, tensor in tensors.items()
    }


@pytest.fixture
def scene(make_plan, trainer, loader, run_sync, endpoint):
    """A sender rank or several, and a receiver; ``sync`` plans a delta on the version before unless told otherwise."""

    class Scene:
        def __init__(self, num_ranks=1, **options):
            chosen = DeltaOptions(**options)
            self.endpoints = tuple(endpoint("trainer", rank=rank) for rank in range(num_ranks))
            self.senders = [DeltaSender(chosen, one) for one in self.endpoints]
            self.receiver = DeltaReceiver(chosen, endpoint("generator"))
            self.version, self.base = 0, None

        def plan(self, tensors, version, base):
            payload = "full" if base is None else "delta"
            changes = {"sync_id": f"v{version}", "policy_version": version, "base_version": base, "payload": payload}
            return make_plan(tensors, senders=self.endpoints, bucket_bytes=3 << 16, **changes)

        async def sync(self, tensors, base="last", receivers=None, before=None):
            self.version += 1
            plan = self.plan(tensors, self.version, self.base if base == "last" else base)
            names = list(tensors)
            parts = [{n: tensors[n] for n in names[r :: len(self.senders)]} for r in range(len(self.senders))]
            trainers = [trainer(part, rank, before) for rank, part in enumerate(parts)]
            receivers = [self.receiver] if receivers is None else receivers
            loaders = [loader() for _ in receivers]
            results = await run_sync(plan, self.senders, trainers, receivers, loaders)
            if not any(isinstance(result, BaseException) for result in results):
                self.base = self.version
            return results, loaders

        @property
        def directories(self):
            workspace = Path(self.plan({"w": torch.zeros(1)}, 0, None).workspace)
            return sorted(path.name for path in workspace.iterdir())

        def close(self):
            for end in (*self.senders, self.receiver):
                end.close()

    made = []

    def make(*arguments, **options):
        made.append(Scene(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same_bits(loaded, tensors):
    return loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


async def test_every_version_of_a_chain_is_exact_and_small(scene, weights):
    here = scene()
    (full, _), [load] = await here.sync(weights)
    assert same_bits(load.loaded, weights)
    for seed in range(3):
        weights = stepped(weights, seed=seed)
        (sent, received), [load] = await here.sync(weights)
        assert same_bits(load.loaded, weights)
        assert sent == received
        assert sent < full / 5, "a hundredth of the elements changed"
    assert here.directories == ["v1", "v2", "v3", "v4"], "a replica that comes back needs them all"


async def test_nothing_changed(scene, weights):
    here = scene()
    await here.sync(weights)
    (sent, _), [load] = await here.sync(weights)
    assert sent == 0
    assert same_bits(load.loaded, weights)


async def test_a_full_version_comes_now_and_then_and_ends_the_chain_before_it(scene, weights):
    here, sizes = scene(full_every=3), []
    for seed in range(5):
        weights = stepped(weights, seed=seed)
        (sent, _), [load] = await here.sync(weights)
        assert same_bits(load.loaded, weights)
        sizes.append(sent)
    assert [size > max(sizes) / 2 for size in sizes] == [True, False, False, True, False]
    assert here.directories == ["v4", "v5"]


async def test_a_replica_that_missed_versions_reads_them_all(scene, weights, loader, endpoint):
    here = scene()
    await here.sync(weights)
    for seed in range(3):
        weights = stepped(weights, seed=seed)
        await here.sync(weights)
    late, load = DeltaReceiver(DeltaOptions(), endpoint("generator", replica=1)), loader()
    received = await late.receive(here.plan(weights, 4, 3), [], load)
    assert same_bits(load.loaded, weights)
    assert received > sum(tensor.nbytes for tensor in weights.values())
    weights = stepped(weights, seed=9)
    results, loads = await here.sync(weights, receivers=[here.receiver, late])
    assert results[1] == results[2] < received / 5, "from then on both follow"
    assert all(same_bits(one.loaded, weights) for one in loads)
    late.close()


async def test_ranks_write_side_by_side(scene, weights):
    here = scene(num_ranks=2)
    await here.sync(weights)
    weights = stepped(weights)
    (first, second, received), [load] = await here.sync(weights)
    assert same_bits(load.loaded, weights)
    assert first > 0
    assert second > 0
    assert first + second == received


async def test_after_a_sync_that_failed_nothing_is_taken_for_sent(scene, weights):
    """The copy had moved on for part of the tensors when the sender failed; the next delta must not build on it."""
    here = scene()
    await here.sync(weights)

    def fail(name):
        if name == "layer.weight":
            raise RuntimeError("gather failed")

    weights = stepped(weights, seed=3)
    (sent, received), _ = await here.sync(weights, before=fail)
    assert isinstance(sent, RuntimeError)
    assert "gather failed" in str(received)
    (sent, _), [load] = await here.sync(weights, base=1)
    assert same_bits(load.loaded, weights)
    assert sent > sum(tensor.nbytes for tensor in weights.values()), "everything once more"


async def test_a_version_that_was_removed_is_named(scene, weights, loader, endpoint):
    here = scene()
    await here.sync(weights)
    weights = stepped(weights)
    await here.sync(weights)
    plan = here.plan(weights, 2, 1)
    shutil.rmtree(Path(plan.workspace) / "v1")
    late = DeltaReceiver(DeltaOptions(), endpoint("generator", replica=1))
    with pytest.raises(WeightSyncError, match=r"version 2 in .*v2 builds on .*v1, which is missing"):
        await late.receive(plan, [], loader())
    late.close()


async def test_a_delta_on_other_weights_is_noticed(scene, weights, loader):
    """What comes out is compared with what the sender has, tensor by tensor."""
    here = scene()
    await here.sync(weights)
    here.receiver._copy.tensors["embed.weight"][0, 0] += 1
    weights = stepped(weights)
    results, _ = await here.sync(weights)
    assert "'embed.weight' of policy version 2 differs from the sender's after its delta was applied" in str(
        results[-1]
    )
    assert here.receiver._copy.sync_id is None
    load = loader()
    await here.receiver.receive(here.plan(weights, 2, 1), [], load)
    assert same_bits(load.loaded, weights), "it starts again from the full version"


async def test_a_stream_that_lacks_a_tensor_is_refused(scene, weights):
    here = scene()
    plan = here.plan(weights, 1, None)
    less = {name: tensor for name, tensor in weights.items() if not name.startswith("frozen")}

    class Less:
        def weights(self, export="full_tensors"):
            for name, tensor in less.items():
                yield WeightShard(name, tuple(tensor.shape), tuple((0, s) for s in tensor.shape), 0, tensor)

    [sender] = here.senders
    sender.offer(plan)
    with pytest.raises(WeightSyncError, match=r"1 of 3 tensors were not streamed by any rank: frozen\.weight"):
        sender.send(plan, Less())
    sender.release(plan)
