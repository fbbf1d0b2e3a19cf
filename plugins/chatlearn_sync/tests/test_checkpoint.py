from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from chatlearn_core.exceptions import BackendTimeoutError, WeightSyncError
from chatlearn_core.protocols import WeightReceiver, WeightSender
from chatlearn_core.types import SyncOffer
from chatlearn_sync import weight_files
from chatlearn_sync.checkpoint import CheckpointReceiver, CheckpointSender
from chatlearn_sync.options import CheckpointOptions


@pytest.fixture
def ends(endpoint):
    def make(num_senders=1, num_receivers=1, **options):
        chosen = CheckpointOptions(**options)
        senders = [CheckpointSender(chosen, endpoint("trainer", rank=r)) for r in range(num_senders)]
        receivers = [CheckpointReceiver(chosen, endpoint("generator", replica=r)) for r in range(num_receivers)]
        return senders, receivers

    return make


def written(plan, sender, trainer):
    """Offer, send, and no release: the version lies in the workspace."""
    offer = sender.offer(plan)
    sender.send(plan, trainer)
    return offer, Path(offer.content.directory)


def test_ends_are_what_the_protocol_says(ends):
    (sender,), (receiver,) = ends()
    assert isinstance(sender, WeightSender)
    assert isinstance(receiver, WeightReceiver)


async def test_every_tensor_arrives(tensors, make_plan, trainer, loader, run_sync, ends, endpoint):
    senders, receivers = ends(num_receivers=2)
    plan = make_plan(tensors, receivers=tuple(endpoint("generator", replica=r) for r in range(2)))
    loaders = [loader(), loader()]
    sent, *received = await run_sync(plan, senders, [trainer(tensors)], receivers, loaders)
    assert received == [sent, sent]
    for load in loaders:
        assert load.loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert load.loaded[name].dtype == tensor.dtype
            assert torch.equal(load.loaded[name], tensor)


def test_the_directory_is_a_hugging_face_checkpoint_in_shards(tensors, make_plan, trainer, ends):
    (sender,), _ = ends()
    _, directory = written(make_plan(tensors), sender, trainer(tensors))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert (
        len(set(index["weight_map"].values())) == 2
    )  # 1024 bytes of embed.weight over the 512 of a bucket, then the rest
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), tensors[name])
    assert sorted(p.name for p in directory.parent.iterdir()) == ["sync-1"]


def test_options_bound_the_shard(make_plan, trainer, ends):
    tensors = {f"t{i}": torch.zeros(1 << 17) for i in range(4)}  # 512 KiB each
    (sender,), _ = ends(max_shard_mb=1)
    _, directory = written(make_plan(tensors, bucket_bytes=1 << 30), sender, trainer(tensors))
    assert len(list(directory.glob("*.safetensors"))) == 2


async def test_ranks_write_side_by_side(tensors, make_plan, trainer, loader, run_sync, ends, endpoint):
    names = list(tensors)
    parts = [{n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]}]
    senders, receivers = ends(num_senders=2)
    plan = make_plan(tensors, senders=tuple(endpoint("trainer", rank=r) for r in range(2)))
    load = loader()
    trainers = [trainer(parts[r], rank=r) for r in range(2)]
    first, second, received = await run_sync(plan, senders, trainers, receivers, [load])
    assert first + second == received
    assert all(torch.equal(load.loaded[name], tensors[name]) for name in names)


async def test_a_rank_that_fails_frees_the_other_rank_and_the_receiver(
    tensors, make_plan, trainer, loader, run_sync, ends, endpoint
):
    def die(name):
        raise RuntimeError("gather failed")

    senders, receivers = ends(num_senders=2)
    plan = make_plan(tensors, senders=tuple(endpoint("trainer", rank=r) for r in range(2)), timeout_s=1e6)
    trainers = [trainer({}, rank=0), trainer(tensors, rank=1, before=die)]
    lead, failed, received = await run_sync(plan, senders, trainers, receivers, [loader()])
    assert isinstance(failed, RuntimeError)
    for result in (lead, received):
        assert isinstance(result, WeightSyncError)
        assert "rank 1" in str(result)
        assert "RuntimeError: gather failed" in str(result)
    assert list(Path(plan.workspace).iterdir()) == []


def test_ranks_that_never_write_are_named(tensors, make_plan, trainer, ends, endpoint):
    (sender, _), _ = ends(num_senders=2)
    plan = make_plan(tensors, senders=tuple(endpoint("trainer", rank=r) for r in range(2)), timeout_s=0.05)
    sender.offer(plan)
    with pytest.raises(BackendTimeoutError, match=r"rank 0.*waited 0.05 s .*for sender ranks \[1\] to write into"):
        sender.send(plan, trainer(tensors))


async def test_two_ranks_with_the_same_tensor(tensors, make_plan, trainer, loader, run_sync, ends, endpoint):
    senders, receivers = ends(num_senders=2)
    plan = make_plan(tensors, senders=tuple(endpoint("trainer", rank=r) for r in range(2)))
    trainers = [trainer(tensors, rank=0), trainer({"scale": tensors["scale"]}, rank=1)]
    lead, _, received = await run_sync(plan, senders, trainers, receivers, [loader()])
    assert "two ranks streamed the same tensors: scale" in str(lead)
    assert isinstance(received, WeightSyncError)


async def test_a_receiver_whose_sender_never_finishes_says_whom_it_waited_for(tensors, make_plan, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors, timeout_s=0.05)
    with pytest.raises(BackendTimeoutError, match=r"waited 0.05 s .*for sender ranks \[0\] to complete .*sync-1"):
        await receiver.receive(plan, [sender.offer(plan)], loader())


async def test_a_sender_that_dies_midway_leaves_no_version(tensors, make_plan, trainer, loader, run_sync, ends):
    def die(name):
        if name == "scale":
            raise RuntimeError("out of memory")

    senders, receivers = ends()
    load = loader()
    plan = make_plan(tensors, timeout_s=1e6)
    sent, received = await run_sync(plan, senders, [trainer(tensors, before=die)], receivers, [load])
    assert isinstance(sent, RuntimeError)
    assert isinstance(received, WeightSyncError)
    assert "RuntimeError: out of memory" in str(received)
    assert load.loaded == {}
    assert list(Path(plan.workspace).iterdir()) == []


async def test_what_a_killed_sender_left_is_cleared_by_the_next(tensors, make_plan, trainer, loader, run_sync, ends):
    plan = make_plan(tensors)
    workspace = Path(plan.workspace)
    for leftover in ("sync-0.trainer.tmp", "sync-1.trainer.tmp", "sync-1"):
        (workspace / leftover).mkdir(parents=True)
        (workspace / leftover / "model-rank00000-00000.safetensors").write_bytes(b"half")
    (workspace / "sync-1.failed").write_text("an old failure")
    (workspace / "sync-9.critic.tmp").mkdir()
    senders, receivers = ends()
    load = loader()
    sent, received = await run_sync(plan, senders, [trainer(tensors)], receivers, [load])
    assert sent == received
    assert sorted(p.name for p in workspace.iterdir()) == ["sync-1", "sync-9.critic.tmp"]  # another role's is not ours


async def test_a_receiver_that_dies_can_take_the_version_again_without_the_sender(
    tensors, make_plan, trainer, loader, run_sync, ends
):
    def die(name):
        raise RuntimeError("engine is gone")

    senders, receivers = ends()
    plan = make_plan(tensors)
    sent, received = await run_sync(plan, senders, [trainer(tensors)], receivers, [loader(before=die)])
    assert isinstance(sent, int)
    assert isinstance(received, RuntimeError)
    load = loader()
    assert await receivers[0].receive(plan, [], load) == sent
    assert load.loaded.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(2)}, "'extra' is not in the manifest"),
        ({"scale": torch.zeros(2)}, r"'scale' has shape \[2\]"),
        ({"scale": torch.zeros((), dtype=torch.float64)}, "'scale' has dtype float64"),
        ({"scale": None}, "1 of 4 tensors were not streamed by any rank: scale"),
    ],
)
async def test_a_stream_that_breaks_its_manifest_fails_both_ends(
    tensors, make_plan, trainer, loader, run_sync, ends, change, message
):
    streamed = {n: t for n, t in (tensors | change).items() if t is not None}
    senders, receivers = ends()
    results = await run_sync(make_plan(tensors), senders, [trainer(streamed)], receivers, [loader()])
    for result in results:
        assert isinstance(result, WeightSyncError)
        with pytest.raises(WeightSyncError, match=message):
            raise result


async def test_a_receiver_checks_against_its_own_plan(tensors, make_plan, trainer, loader, ends):
    (sender,), (receiver,) = ends()
    offer, directory = written(make_plan(tensors), sender, trainer(tensors))
    wrong_shape = make_plan(tensors | {"scale": torch.zeros(3)})
    with pytest.raises(WeightSyncError, match=r"scale: shape \[\] offered, \[3\] expected"):
        await receiver.receive(wrong_shape, [offer], loader())
    renamed = {("gain" if n == "scale" else n): t for n, t in tensors.items()}
    with pytest.raises(WeightSyncError, match="gain: expected by the generator, not offered by the trainer"):
        await receiver.receive(make_plan(renamed), [offer], loader())
    with pytest.raises(WeightSyncError, match=r"policy version 1; the plan says 'sync-1', 2"):
        await receiver.receive(make_plan(tensors, policy_version=2), [offer], loader())
    with pytest.raises(WeightSyncError, match=r"offered .*sync-1, the plan says .*sync-2"):
        await receiver.receive(make_plan(tensors, sync_id="sync-2"), [offer], loader())
    with pytest.raises(WeightSyncError, match="offered a int, which is not an offer of 'checkpoint'"):
        await receiver.receive(make_plan(tensors), [SyncOffer(0, 5)], loader())
    assert directory.exists()


def test_offers_travel_between_processes(tensors, make_plan, ends):
    (sender,), _ = ends()
    content = sender.offer(make_plan(tensors)).content
    assert pickle.loads(pickle.dumps(content)) == content


async def test_a_tied_alias_travels_beside_its_tensor(make_plan, trainer, loader, run_sync, ends):
    """The alias shares memory with its tensor, which safetensors refuses to write twice as it is."""
    embed = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    senders, receivers = ends()
    plan = make_plan({"embed": embed}, {"lm_head": "embed"})
    load = loader()
    sent, received = await run_sync(plan, senders, [trainer({"embed": embed, "lm_head": embed})], receivers, [load])
    assert sent == received
    assert torch.equal(load.loaded["lm_head"], embed)
    only_base = loader()
    plan = make_plan({"embed": embed}, {"lm_head": "embed"}, sync_id="sync-2")
    await run_sync(plan, senders, [trainer({"embed": embed})], receivers, [only_base])
    assert only_base.loaded.keys() == {"embed"}


async def test_strided_and_empty_tensors(make_plan, trainer, loader, run_sync, ends):
    tensors = {"transposed": torch.arange(6.0).reshape(2, 3).T, "empty": torch.zeros(0, 4)}
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(tensors), senders, [trainer(tensors)], receivers, [load])
    assert torch.equal(load.loaded["transposed"], tensors["transposed"])
    assert load.loaded["empty"].shape == (0, 4)


async def test_a_flipped_bit_names_file_and_tensor(tensors, make_plan, trainer, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors)
    offer, directory = written(plan, sender, trainer(tensors))
    path = directory / "model-rank00000-00000.safetensors"  # holds embed.weight alone
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    load = loader()
    with pytest.raises(WeightSyncError, match=r"model-rank00000-00000.safetensors: corrupted: tensor 'embed.weight'"):
        await receiver.receive(plan, [offer], load)
    assert load.loaded == {}
    trusting = CheckpointReceiver(CheckpointOptions(verify_checksums=False), plan.receivers[0])
    await trusting.receive(plan, [offer], load)
    assert not torch.equal(load.loaded["embed.weight"], tensors["embed.weight"])


@pytest.mark.parametrize(("position", "message"), [(12, "header"), (0, "header")])
async def test_a_damaged_header_names_the_file(tensors, make_plan, trainer, loader, ends, position, message):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors)
    offer, directory = written(plan, sender, trainer(tensors))
    path = directory / "model-rank00000-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightSyncError, match=rf"model-rank00000-00000.safetensors: corrupted: .*{message}"):
        await receiver.receive(plan, [offer], loader())


async def test_a_truncated_or_missing_file_is_named(tensors, make_plan, trainer, loader, ends):
    (sender,), (receiver,) = ends()
    plan = make_plan(tensors)
    offer, directory = written(plan, sender, trainer(tensors))
    path = directory / "model-rank00000-00001.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 7)
    with pytest.raises(WeightSyncError, match=rf"00001.safetensors: cut short: it has {size - 7} bytes.* {size}"):
        await receiver.receive(plan, [offer], loader())
    path.unlink()
    with pytest.raises(WeightSyncError, match=r"00001.safetensors: in the index, but cannot be read"):
        await receiver.receive(plan, [offer], loader())
    (directory / weight_files.INDEX_NAME).write_text('{"format": 1, "files"')
    with pytest.raises(WeightSyncError, match=r"chatlearn_weights.json: not a readable weight index"):
        await receiver.receive(plan, [offer], loader())


async def test_the_newest_versions_stay(tensors, make_plan, trainer, loader, run_sync, ends):
    senders, receivers = ends(keep_versions=2)
    workspace = None
    for version in (7, 8, 3):  # a run that resumed from an earlier step counts from there again
        new = {n: torch.full_like(t, version) for n, t in tensors.items()}
        plan = make_plan(new, sync_id=f"v{version}", policy_version=version)
        workspace = Path(plan.workspace)
        load = loader()
        await run_sync(plan, senders, [trainer(new)], receivers, [load])
        assert all(torch.equal(load.loaded[name], new[name]) for name in new)
    assert workspace is not None
    assert sorted(p.name for p in workspace.iterdir()) == ["v3", "v8"]


def test_a_workspace_that_cannot_be_made_is_named(tensors, make_plan, ends, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (sender,), _ = ends()
    plan = make_plan(tensors, workspace=str(tmp_path / "file" / "sync"))
    with pytest.raises(WeightSyncError, match=r"file/sync: cannot write weights: .*move output_dir"):
        sender.offer(plan)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
async def test_a_disk_that_does_not_take_the_bytes(
    tensors, make_plan, trainer, loader, run_sync, ends, monkeypatch, code
):
    def refuse(tensors, path, metadata):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(weight_files, "save_file", refuse)
    senders, receivers = ends()
    sent, received = await run_sync(make_plan(tensors), senders, [trainer(tensors)], receivers, [loader()])
    assert isinstance(sent, WeightSyncError)
    assert "model-rank00000-00000.safetensors: cannot write weights" in str(sent)
    assert os.strerror(code) in str(sent)
    assert isinstance(received, WeightSyncError)


async def test_a_real_write_failure_is_named(tensors, make_plan, trainer, ends):
    """The staging directory vanishes: safetensors' own error is not an OSError."""
    (sender,), _ = ends()
    plan = make_plan(tensors)
    sender.offer(plan)
    (Path(plan.workspace) / "sync-1.trainer.tmp").rmdir()
    with pytest.raises(WeightSyncError, match="cannot write weights"):
        await asyncio.to_thread(sender.send, plan, trainer(tensors))


def test_close_twice_is_fine(ends):
    for end in (*ends()[0], *ends()[1]):
        end.close()
        end.close()
