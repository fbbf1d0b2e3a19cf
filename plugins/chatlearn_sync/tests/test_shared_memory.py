from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path

import pytest
import torch

from chatlearn_core.exceptions import WeightSyncError
from chatlearn_sync import shared_memory
from chatlearn_sync.options import SharedMemoryOptions
from chatlearn_sync.shared_memory import SharedMemoryReceiver, SharedMemorySender
from chatlearn_testing.suites.weight_sync_fixtures import KeepingLoader

PAGE = shared_memory.PAGE_BYTES
PAGE_OF_FLOATS = PAGE // 4


@pytest.fixture
def pages():
    """Eight tensors of one page each."""
    return {f"t{i}": torch.full((PAGE_OF_FLOATS,), float(i)) for i in range(8)}


@pytest.fixture
def ends(endpoint):
    made = []

    def make(num_senders=1, num_receivers=1, **options):
        chosen = SharedMemoryOptions(**options)
        senders = [SharedMemorySender(chosen, endpoint("trainer", rank=r)) for r in range(num_senders)]
        receivers = [SharedMemoryReceiver(chosen, endpoint("generator", replica=r)) for r in range(num_receivers)]
        made.extend([*senders, *receivers])
        return senders, receivers

    yield make
    for one in made:
        one.close()


async def test_memory_stays_under_the_bucket_bytes(pages, make_plan, trainer, loader, run_sync, ends):
    most = 0

    class Watching(trainer):
        def weights(self, export="full_tensors"):
            nonlocal most
            for shard in super().weights():
                most = max(most, senders[0].held_bytes)
                yield shard

    senders, receivers = ends()
    plan = make_plan(pages, bucket_bytes=7 * PAGE)
    load = loader()
    await run_sync(plan, senders, [Watching(pages)], receivers, [load])
    assert load.loaded.keys() == pages.keys()
    assert most == 2 * 2 * PAGE, "two slots of a third each, in whole pages; the rest is what the trainer gathers"
    assert [len(load.calls), max(load.calls)] == [4, 2 * PAGE]


async def test_a_block_is_read_when_an_eighth_of_the_model_is_in_it_and_not_when_it_is_full(
    pages, make_plan, trainer, loader, run_sync, ends, monkeypatch
):
    monkeypatch.setattr(shared_memory, "LEAST_FILL_BYTES", PAGE)
    tensors = {"first": torch.randn(3 * PAGE_OF_FLOATS), **pages, "last": torch.randn(5)}
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(tensors, bucket_bytes=30 * PAGE), senders, [trainer(tensors)], receivers, [load])
    assert senders[0].held_bytes == 2 * 3 * PAGE, "a block has room for the largest tensor"
    assert load.calls[0] == 3 * PAGE, "which is a bucket by itself"
    assert load.calls[1:] == [*([PAGE] * 7), PAGE + 20], "an eighth of eleven pages and a bit holds one"


async def test_parts_grow_so_that_loading_begins_early(pages, make_plan, trainer, loader, run_sync, ends, monkeypatch):
    monkeypatch.setattr(shared_memory, "FIRST_FILL_BYTES", PAGE)
    monkeypatch.setattr(shared_memory, "LEAST_FILL_BYTES", 4 * PAGE)
    tensors = pages | {f"more{i}": torch.full((PAGE_OF_FLOATS,), float(i)) for i in range(4)}
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(tensors, bucket_bytes=30 * PAGE), senders, [trainer(tensors)], receivers, [load])
    assert load.calls == [PAGE, 2 * PAGE, 4 * PAGE, 4 * PAGE, PAGE], "twelve pages, at most four at a time"
    assert senders[0].held_bytes == 2 * 4 * PAGE


async def test_the_first_part_is_filled_before_a_receiver_is_there(pages, make_plan, trainer, loader, ends):
    """A generator may take a while to stop serving."""
    filled = threading.Event()

    def before_gather(name):
        if name == "t1":
            filled.set()

    senders, receivers = ends()
    plan, load = make_plan(pages, bucket_bytes=3 * PAGE), loader()
    offer = senders[0].offer(plan)
    sending = asyncio.create_task(asyncio.to_thread(senders[0].send, plan, trainer(pages, before=before_gather)))
    assert await asyncio.to_thread(filled.wait, 10), "nothing is gathered until a receiver connects"
    assert await receivers[0].receive(plan, [offer], load) == 8 * PAGE
    assert await sending == 8 * PAGE
    senders[0].release(plan)


async def test_a_receiver_that_comes_after_the_failure_hears_of_it(pages, make_plan, trainer, loader, ends):
    failed = threading.Event()

    def fail(name):
        failed.set()
        raise RuntimeError("gather failed")

    senders, receivers = ends()
    plan = make_plan(pages)
    offer = senders[0].offer(plan)
    sending = asyncio.create_task(asyncio.to_thread(senders[0].send, plan, trainer(pages, before=fail)))
    assert await asyncio.to_thread(failed.wait, 10)
    with pytest.raises(WeightSyncError, match="gather failed"):
        await receivers[0].receive(plan, [offer], loader())
    with pytest.raises(RuntimeError, match="gather failed"):
        await sending


async def test_a_tensor_above_the_limit_has_a_block_of_its_own(pages, make_plan, trainer, loader, run_sync, ends):
    tensors = pages | {"large": torch.randn(20 * PAGE_OF_FLOATS), "after": torch.randn(5)}
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(tensors, bucket_bytes=6 * PAGE), senders, [trainer(tensors)], receivers, [load])
    assert all(torch.equal(load.loaded[name], tensors[name]) for name in tensors)
    assert senders[0].held_bytes == (20 + 2 * 2) * PAGE


async def test_the_next_bucket_is_gathered_while_one_is_loaded(pages, make_plan, trainer, loader, run_sync, ends):
    """The loader of the first bucket waits until the trainer is at the third: that takes two slots at a time."""
    gathered, events = threading.Event(), []

    def before_gather(name):
        events.append(f"gather {name}")
        if name == "t2":
            gathered.set()

    def before_load(name):
        assert gathered.wait(10), "nothing is gathered while a bucket is loaded"
        events.append(f"load {name}")

    class Patient(loader):
        async def load_tensors(self, tensors):
            for name, tensor in tensors:
                await asyncio.to_thread(before_load, name)
                self.loaded[name] = tensor.clone()

    senders, receivers = ends()
    plan, load = make_plan(pages, bucket_bytes=3 * PAGE), Patient()
    await run_sync(plan, senders, [trainer(pages, before=before_gather)], receivers, [load])
    assert load.loaded.keys() == pages.keys()
    assert events.index("gather t2") < events.index("load t0")
    assert events.index("gather t4") > events.index("load t0"), "no further ahead than there are slots"


async def test_blocks_are_kept_for_the_next_sync(pages, make_plan, trainer, loader, run_sync, ends):
    """A page that is touched for the first time costs much more than copying it."""
    senders, receivers = ends()
    kept = []
    for version in (1, 2):
        plan = make_plan(pages, sync_id=f"sync-{version}", policy_version=version, bucket_bytes=3 * PAGE)
        await run_sync(plan, senders, [trainer(pages)], receivers, [loader()])
        kept.append(([slot.key for slot in senders[0]._slots], sorted(receivers[0]._mappings)))
    assert kept[0] == kept[1]
    plan = make_plan(pages, sync_id="sync-3", bucket_bytes=6 * PAGE)
    load = loader()
    await run_sync(plan, senders, [trainer(pages)], receivers, [load])
    assert load.loaded.keys() == pages.keys()
    assert set(receivers[0]._mappings).isdisjoint(kept[0][1]), "other blocks: the old ones are let go"


@pytest.mark.parametrize("channel", ["tensors", "memory_handles"])
async def test_a_corrupted_byte_is_noticed(pages, make_plan, trainer, run_sync, ends, monkeypatch, channel):
    pack = shared_memory.copy_with_checksum

    def corrupt(source, target):
        found = pack(source, target)
        if float(source[0]) == 5.0:
            target.view(torch.uint8)[100] ^= 4
        return found

    monkeypatch.setattr(shared_memory, "copy_with_checksum", corrupt)
    senders, receivers = ends(verify_checksums=True)
    sent, received = await run_sync(
        make_plan(pages, channel=channel), senders, [trainer(pages)], receivers, [KeepingLoader()]
    )
    assert isinstance(received, WeightSyncError)
    assert "bucket" in str(received)
    assert "tensor 't5' is corrupted" in str(received)
    assert "tensor 't5' is corrupted" in str(sent)


async def test_checksums_are_not_made_unless_they_are_asked_for(
    pages, make_plan, trainer, loader, run_sync, ends, monkeypatch
):
    monkeypatch.setattr(shared_memory, "copy_with_checksum", None)
    senders, receivers = ends()
    load = loader()
    await run_sync(make_plan(pages), senders, [trainer(pages)], receivers, [load])
    assert all(torch.equal(load.loaded[name], pages[name]) for name in pages)


def test_another_host_is_refused_with_the_remedy(pages, make_plan, ends, endpoint):
    (sender,), _ = ends()
    far = dataclasses.replace(endpoint("generator"), host="host-b")
    with pytest.raises(WeightSyncError, match=r"do not share a host, .*; set weight_sync\.backend to .*'broadcast'"):
        sender.offer(make_plan(pages, receivers=(far,)))


async def test_a_block_that_cannot_be_opened_names_the_reason(
    pages, make_plan, trainer, loader, run_sync, ends, monkeypatch
):
    def refuse(path, num_bytes):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(shared_memory, "Mapping", refuse)
    senders, receivers = ends()
    _, received = await run_sync(make_plan(pages), senders, [trainer(pages)], receivers, [loader()])
    assert "cannot be opened at /proc/" in str(received)
    assert "another container" in str(received)


async def test_nothing_has_a_name_in_the_file_system(pages, make_plan, trainer, loader, run_sync, ends):
    before = set(Path("/dev/shm").iterdir())
    senders, receivers = ends()
    found = []
    spying = trainer(pages, before=lambda name: found.append(set(Path("/dev/shm").iterdir()) - before))
    await run_sync(make_plan(pages), senders, [spying], receivers, [loader()])
    assert not any(path.name.startswith("chatlearn") for paths in found for path in paths)
