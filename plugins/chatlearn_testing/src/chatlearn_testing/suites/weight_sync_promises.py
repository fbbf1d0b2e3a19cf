"""The contract of a transport's promises: payloads, reach, memory, an event loop that stays free, cancellation."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from chatlearn_core.plugins.records import Export, Reach
from chatlearn_core.protocols import Trainer, WeightSender
from chatlearn_core.types import Payload, SyncRequest, WeightManifest, WeightShard
from chatlearn_testing.applicability import not_applicable
from chatlearn_testing.loop_watch import blocks_of, least
from chatlearn_testing.model_directory import manifest_of
from chatlearn_testing.other_host import leave_host
from chatlearn_testing.reused_memory import overwrite
from chatlearn_testing.suites.conformance_suite import ConformanceSuite
from chatlearn_testing.suites.weight_sync_fixtures import (
    KeepingLoader,
    StreamingTrainer,
    Transport,
    WeightSyncFixtures,
    assert_loaded,
    make_tensors,
)

BLOCK_S = 0.6
"""Most time for which ``receive`` may keep the event loop from other work during a sync of a dozen buckets, seconds."""
SETTLED_S = 0.4
"""Time after ``send`` in which the files of a transport must not change any more, seconds."""
SILENT_S = 0.15
"""Time for which a receiver waits for a silent sender before it is cancelled, seconds."""
REACHES: dict[Reach, tuple[Reach, ...]] = {"process": (), "host": ("host",), "anywhere": ("host", "anywhere")}
"""Declared reach -> the distances at which a receiver in another process is tried."""
OVERHEAD = 1.5
"""Most bytes that an end reports, as a multiple of the tensors' bytes..."""
OVERHEAD_BYTES = 4096
"""...and in addition: names, headers and padding of small tensors."""


class WeightSyncPromisesContract(WeightSyncFixtures, ConformanceSuite):
    """The part of ``WeightSyncConformance`` about what the record and the protocol promise."""

    def test_what_was_sent_may_be_overwritten(self, transport: Transport) -> None:
        """The trainer changes its weights as soon as ``send`` has returned; receivers get the values of the sync.

        Other values: the sender kept references to the trainer's tensors instead of copying or sending them.
        """
        tensors = make_tensors()
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        has_sent = threading.Event()

        def wait_once(name: str) -> None:
            has_sent.wait(SILENT_S)  # a transport that buffers everything has sent it by then

        def send(sender: WeightSender, plan: SyncRequest) -> int:
            sent = sender.send(plan, _trainer(StreamingTrainer(given)))
            for tensor in given.values():
                overwrite(tensor)
            has_sent.set()
            return sent

        loader = KeepingLoader(before=wait_once)
        self.run(_send_and_receive(transport, transport.plan(tensors), send, loader))
        assert_loaded(loader, tensors)

    def test_the_end_is_what_send_returns(self, transport: Transport) -> None:
        """When ``send`` returns, everything is sent: no thread writes on, and no file changes any more."""
        tensors = make_tensors()
        states: list[dict[str, int]] = []
        threads: list[set[threading.Thread]] = []

        def send(sender: WeightSender, plan: SyncRequest) -> int:
            before = set(threading.enumerate())
            sent = sender.send(plan, _trainer(StreamingTrainer(tensors)))
            states.append(_sizes(transport.workspace))
            threads.append(
                {thread for thread in set(threading.enumerate()) - before if isinstance(thread, threading.Timer)}
            )
            time.sleep(SETTLED_S)
            states.append(_sizes(transport.workspace))
            return sent

        self.run(_send_and_receive(transport, transport.plan(tensors), send, KeepingLoader()))
        assert not threads[0], "send returned while a timer of it was to write later"
        changed = sorted(
            name for name in states[0].keys() | states[1].keys() if states[0].get(name) != states[1].get(name)
        )
        assert not changed, f"files changed after send had returned: {', '.join(changed)}"

    def test_bytes_are_counted(self, transport: Transport) -> None:
        """``send`` and ``receive`` return the number of bytes of the tensors, plus at most a little for names."""
        tensors = {"large.weight": _drawn(96, 64), "small.weight": _drawn(8)}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)]))
        assert not outcome.errors, outcome.errors
        for end, counted in (("send", outcome.senders[0]), ("receive", outcome.receivers[0])):
            assert num_bytes <= counted <= OVERHEAD * num_bytes + OVERHEAD_BYTES, (
                f"{end} returned {counted}; the tensors have {num_bytes} bytes"
            )

    def test_buckets_bound_the_memory(self, transport: Transport) -> None:
        """Streamed tensors that a sender holds, and tensors that a receiver holds while it loads, stay within
        ``plan.bucket_bytes``, however many small tensors a model has; after ``send`` none is held.
        """
        tensors = {f"layers.{index}.weight": torch.full((64,), float(index)) for index in range(96)}
        plan = transport.plan(tensors)
        trainer, loader = _CountingTrainer(tensors), _CountingLoader()

        def send(sender: WeightSender, plan: SyncRequest) -> int:
            sent = sender.send(plan, _trainer(trainer))
            trainer.held_at_the_end = trainer.held()
            return sent

        self.run(_send_and_receive(transport, plan, send, loader))
        assert_loaded(loader, tensors)
        assert trainer.most_held <= plan.bucket_bytes, (
            f"the sender held {trainer.most_held} bytes of streamed tensors, bucket_bytes is {plan.bucket_bytes}"
        )
        assert not trainer.held_at_the_end, f"the sender holds {trainer.held_at_the_end} bytes after send has returned"
        assembles = self.export_under_test() == "boxes" and plan.channel == "tensors"
        if assembles or "delta" in self.record().payloads:
            return  # the receiver holds whole tensors until their last box, or the last version, by its nature
        assert loader.most_held <= plan.bucket_bytes, (
            f"the receiver held {loader.most_held} bytes of tensors, bucket_bytes is {plan.bucket_bytes}"
        )

    def test_tied_names_are_not_sent(self, transport: Transport) -> None:
        """A tied weight arrives once, under its own name; its alias in the manifest is not sent."""
        tensors = make_tensors()
        plan = transport.plan(tensors, manifest=manifest_of(tensors, {"head.weight": "embed.weight"}))
        outcome = self.run(transport.run(plan, [StreamingTrainer(tensors)]))
        assert not outcome.errors, outcome.errors
        assert_loaded(outcome.loaders[0], tensors)

    def test_the_event_loop_stays_free(self, transport: Transport) -> None:
        """``receive`` lets other coroutines run between and during buckets: requests are served meanwhile."""
        tensors = {f"layers.{index}.weight": _drawn(48, 8) for index in range(12)}

        async def once() -> None:
            outcome = await transport.run(transport.plan(tensors), [StreamingTrainer(tensors)])
            assert not outcome.errors, outcome.errors

        self.run(once())  # what only a first sync does, such as to import
        blocked_s = least(lambda: blocks_of(asyncio.wait_for(once(), self.patience_s)).total_s, BLOCK_S)
        assert blocked_s < BLOCK_S, f"the event loop stood still for {blocked_s:.2f} s during a sync"

    def test_a_cancelled_receiver_ends_as_cancelled(self, transport: Transport) -> None:
        """A ``receive`` that is cancelled while it waits ends as cancelled, and the next sync works."""
        tensors = make_tensors()
        plan = transport.plan(tensors)
        [sender], [receiver] = ends = transport.ends(plan)

        async def cancel() -> bool:
            task = asyncio.create_task(receiver.receive(plan, [sender.offer(plan)], KeepingLoader()))
            await asyncio.sleep(SILENT_S)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        try:
            assert self.run(cancel()), "the receiver swallows its cancellation"
        finally:
            sender.release(plan)
        outcome = self.run(transport.run(transport.plan(tensors), [StreamingTrainer(tensors)], ends=ends))
        assert not outcome.errors, outcome.errors
        assert_loaded(outcome.loaders[0], tensors)

    @pytest.mark.parametrize("where", ["host", "anywhere"])
    def test_another_process_is_reached(self, transport: Transport, where: Reach) -> None:
        """Reach ``host`` and ``anywhere``: a receiver in another process gets every tensor from the pickled offers.
        ``anywhere``: this process shares network and disk with the sender's, but neither memory nor Unix sockets.

        Nothing arrives, or offers cannot be pickled: an object of the sender's process, or of its host, was handed
        over.
        """
        if where not in REACHES[self.record().reach]:
            not_applicable(f"the record declares the reach {self.record().reach!r}")
        tensors = make_tensors()
        here, theirs = multiprocessing.Pipe()
        # Forked before the sync begins, so that the receiver has nothing of it; a new interpreter would load torch.
        process = multiprocessing.get_context("fork").Process(
            target=_receive_elsewhere, args=(theirs, type(self), self.patience_s, where), daemon=True
        )
        process.start()
        theirs.close()
        try:
            assert here.poll(self.patience_s), "the receiver's process does not start"
            if (refused := here.recv()) is not None:
                not_applicable(f"the kernel allows no process that could be on another host ({refused})")
            plan = transport.plan(tensors)
            assert process.pid is not None
            host = "another-host" if where == "anywhere" else plan.receivers[0].host
            plan = replace(plan, receivers=(replace(plan.receivers[0], host=host, process=process.pid),))
            sender = transport.sender(plan.senders[0])
            here.send((plan, [sender.offer(plan)]))
            sent = self.run(asyncio.to_thread(sender.send, plan, _trainer(StreamingTrainer(tensors))))
            assert here.poll(self.patience_s), "the receiver in another process does not answer"
            received, loaded = here.recv()
            sender.release(plan)
        finally:
            process.kill()
            process.join()
            here.close()
        assert isinstance(received, int), f"a receiver in another process failed: {received}"
        assert sent
        assert_loaded(KeepingLoader(loaded={name: _unpacked(packed) for name, packed in loaded.items()}), tensors)

    @pytest.mark.parametrize("payload", ["adapter", "delta"])
    def test_declared_payloads_are_carried(self, transport: Transport, payload: Payload) -> None:
        """``payloads``: an ``adapter`` sync moves the trainer's adapters and nothing else; a ``delta`` sync after a
        full one gives every tensor of the new version, and sends fewer bytes than all weights have.
        """
        if payload not in self.record().payloads:
            not_applicable(f"the record does not declare the payload {payload!r}")
        weights = {name: tensor.clone() for name, tensor in make_tensors().items()}
        if payload == "adapter":
            adapters = {
                "layers.0.proj.lora_A.weight": _drawn(2, 16),
                "layers.0.proj.lora_B.weight": _drawn(8, 2),
            }
            plan = transport.plan(adapters, payload="adapter")
            outcome = self.run(transport.run(plan, [_AdapterTrainer(weights, adapters)]))
            assert not outcome.errors, outcome.errors
            assert_loaded(outcome.loaders[0], adapters)
            return
        weights["large.weight"] = _drawn(256, 64)
        first = transport.plan(weights)
        ends = transport.ends(first)
        assert not self.run(transport.run(first, [StreamingTrainer(weights)], ends=ends)).errors
        weights["large.weight"][3, 5] += 1.0
        second = transport.plan(weights, payload="delta", base_version=first.policy_version)
        outcome = self.run(transport.run(second, [StreamingTrainer(weights)], ends=ends))
        assert not outcome.errors, outcome.errors
        assert_loaded(outcome.loaders[0], weights)
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        assert outcome.senders[0] < num_bytes / 2, (
            f"a delta of one element is {outcome.senders[0]} of {num_bytes} bytes"
        )


async def _send_and_receive(transport: Transport, plan: SyncRequest, send: Any, loader: KeepingLoader) -> None:
    """Run one sync with ``send(sender, plan)`` in a thread; raises what either end raises."""
    [sender], [receiver] = transport.ends(plan)
    transport.loaders.append(loader)
    offers = [sender.offer(plan)]
    try:
        await asyncio.gather(asyncio.to_thread(send, sender, plan), receiver.receive(plan, offers, loader))
    finally:
        sender.release(plan)


def _receive_elsewhere(pipe: Connection, suite: type[WeightSyncFixtures], patience_s: float, where: Reach) -> None:
    """Be the receiver's process: say that it is there, take plan and offers, and answer with the bytes received and the
    tensors.
    """
    try:
        if where == "anywhere":
            leave_host()
    except OSError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    plan, offers = pipe.recv()
    receiver = suite.build("receiver")(suite.make_options(), plan.receivers[0])
    loader = KeepingLoader()
    try:
        received: object = asyncio.run(asyncio.wait_for(receiver.receive(plan, offers, loader), patience_s))
    except BaseException as error:
        received = f"{type(error).__name__}: {error}"
    receiver.close()
    pipe.send((received, {name: _packed(tensor) for name, tensor in loader.loaded.items()}))


def _packed(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def _unpacked(packed: tuple[str, tuple[int, ...], bytes]) -> Tensor:
    dtype, shape, content = packed
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(getattr(torch, dtype)).reshape(shape)


def _sizes(directory: Path) -> dict[str, int]:
    if not directory.is_dir():
        return {}
    return {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _trainer(trainer: StreamingTrainer) -> Trainer:
    return cast("Trainer", trainer)  # in what senders use of it


class _Held:
    """Counts the memory of tensors that something still holds; memory that is used again counts once."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}
        """Address -> the storage there, and its size."""

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._refs[storage.data_ptr()] = ref, storage.nbytes()

    def num_bytes(self) -> int:
        gone = [address for address, (ref, _) in self._refs.items() if ref.expired()]  # type: ignore[no-untyped-call]  # likewise
        for address in gone:
            del self._refs[address]
        return sum(size for _, size in self._refs.values())


class _CountingTrainer(StreamingTrainer):
    """Streams new memory for every tensor, as a trainer that gathers shards, and counts what is held of it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._given = _Held()
        self.most_held = self.held_at_the_end = 0

    def held(self) -> int:
        """Bytes of streamed tensors that are still held."""
        return self._given.num_bytes()

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream copies."""
        for shard in super().weights(export, payload):
            self.most_held = max(self.most_held, self.held())
            copy = replace(shard, tensor=shard.tensor.clone())
            del shard
            self._given.add(copy.tensor)
            yield copy
            del copy


class _CountingLoader(KeepingLoader):
    """Counts the bytes of given tensors that are held at a time."""

    __slots__ = ("_given", "most_held")

    def __init__(self) -> None:
        super().__init__()
        self._given = _Held()
        self.most_held = 0

    async def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Record whole tensors."""
        self._given = _Held()  # blocks that stay mapped for the next bucket hold none of its tensors
        await super().load_tensors(self._counted(tensors))

    def _counted(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self._given.add(tensor)
            self.most_held = max(self.most_held, self._given.num_bytes())
            yield name, tensor


class _AdapterTrainer(StreamingTrainer):
    """A trainer of adapters: the payload decides what it streams."""

    def __init__(self, tensors: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self._adapters = adapters

    def manifest(self, payload: Payload = "full") -> WeightManifest:
        """Return the manifest of the payload."""
        return manifest_of(self._adapters if payload == "adapter" else self.tensors)

    def weights(self, export: Export = "full_tensors", payload: Payload = "full") -> Iterator[WeightShard]:
        """Stream the tensors of the payload."""
        return StreamingTrainer(self._adapters if payload == "adapter" else self.tensors).weights(export)
